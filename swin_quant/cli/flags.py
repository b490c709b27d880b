"""Flags of a command, made from the fields of its options dataclass: name, type, default and help stand once, there.

    @dataclass(frozen=True)
    class CalibrateOptions:
        model: ModelOptions = ModelOptions()  # another dataclass of options: a group in --help, called by its TITLE
        pictures: Annotated[int, Flag("how many calibrate", "N")] = 80

A callable `help` or `choices` must have a name: a lambda in an annotation does not see its module.
`bool` is a switch, `tuple[str, ...]` takes several words, `Literal` its choices, a field without default is required.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from swin_quant.base.errors import UsageError

Options = TypeVar("Options")
_LARGEST = 2**31 - 1  # every library can hold whole numbers up to it


def whole(text: str) -> int:
    """An `int` for argparse; ArgumentTypeError for any other text, or beyond _LARGEST."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from error
    if abs(number) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is beyond {_LARGEST}")
    return number


def at_home(text: str) -> str:
    """The text with a home folder for a leading ~, which shells leave in `--data-path=~/folder`."""
    return os.path.expanduser(text) if text.startswith("~/") else text


_PARSED: dict[Any, Callable[[str], Any]] = {
    int: whole,
    float: float,
    str: at_home,
    Path: lambda text: Path(at_home(text)),
}


@dataclass(frozen=True)
class Flag:
    """Facts for the command line that a field's name, type and default do not tell.

    `name`: the flag, if it is not the field's name. `place`: a positional value, without a flag; `or_flag`: positional
    or with its flag. `optional`: the flag may stand alone, and then means this value. `names`: further spellings.
    `least`: the smallest number.
    """

    help: str | Callable[[], str] = ""
    metavar: str | None = None
    name: str | None = None
    choices: Iterable[Any] | Callable[[], Iterable[Any]] = ()
    place: bool = False
    or_flag: bool = False
    optional: str | None = None
    names: tuple[str, ...] = ()
    least: int | None = None


@dataclass(frozen=True)
class Rare(Flag):
    """A rarely needed flag: `--help-all` shows it, `--help` does not."""


@dataclass(frozen=True)
class Group:
    """A title in --help above the fields of a dataclass within the options, in place of the dataclass's own TITLE."""

    title: str


class OneWay(argparse.Action):
    """Store a value given positionally or by its flag; `ways` records which of the two (`session`)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        if values is None:  # an empty positional
            return
        namespace.ways = getattr(namespace, "ways", set()) | {flag}
        setattr(namespace, self.dest, values)


def add_flags(
    parser: argparse._ActionsContainer, options: type, words: Mapping[str, str] | None = None, rare: bool = True
) -> None:
    """Add a flag for each field of `options`, a dataclass. `words`: this command's names of our flags.

    `rare`: the help includes rare flags.
    """
    for field, kind, note in _fields(options):
        if isinstance(kind, type) and is_dataclass(kind):
            title = note.title if isinstance(note, Group) else getattr(kind, "TITLE", "")
            inner = _group(parser, title) if title else parser
            add_flags(inner, kind, words, rare)
        elif isinstance(note, Flag):
            hidden = isinstance(note, Rare) and not rare
            _add(parser, field, kind, replace(note, help=argparse.SUPPRESS) if hidden else note, words or {}, rare)


def _group(parser: argparse._ActionsContainer, title: str) -> argparse._ActionsContainer:
    """The group with that title, which several dataclasses may fill."""
    there = (group for group in parser._action_groups if group.title == title)
    return next(there, None) or parser.add_argument_group(title)


def options_from(args: argparse.Namespace, options: type[Options]) -> Options:
    """The dataclass with the values of a command line; a field without a flag keeps its default.

    UsageError for a number below the flag's `least`.
    """
    values: dict[str, Any] = {}
    for field, kind, note in _fields(options):
        if isinstance(kind, type) and is_dataclass(kind):
            values[field.name] = options_from(args, kind)
        elif isinstance(note, Flag):
            value = getattr(args, field.name)
            if value is not None:
                if note.least is not None and value < note.least:
                    raise UsageError(f"‹{field.name}› {value}: must be at least {note.least}")
                several = get_origin(kind) is tuple and isinstance(value, str)  # one value, after its flag
                values[field.name] = (value,) if several else tuple(value) if isinstance(value, list) else value
    return options(**values)


def words_from(options: Any) -> list[str]:
    """The arguments of a command line that give these options: positional values, then flags that differ from their
    default.

    The inverse of `options_from`; each argument is unquoted.
    """
    places_first = sorted(_given(options), key=lambda given: bool(given[0]))
    return [word for flag, words in places_first for word in (*flag, *words)]


def flags_given(*options: Any) -> list[str]:
    """The flags of these options that differ from their default."""
    return [word for one in options for flag, _ in _given(one) for word in flag]


def refuse_checkpoint_flags(*options: object) -> None:
    """UsageError for a flag of these options, which only a checkpoint takes."""
    if wrong := flags_given(*options):
        raise UsageError(f"{wrong[0]} is not for artifacts: their run cards say that")


def refuse_artifact_flags(*options: object) -> None:
    """UsageError for a flag of these options, which only an artifact takes."""
    if wrong := flags_given(*options):
        raise UsageError(f"{wrong[0]} is not for checkpoints: name an artifact")


def _given(options: Any) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(the flag, none where values are positional, its values) of each field that differs from its default."""
    for field, kind, note in _fields(type(options)):
        value = getattr(options, field.name)
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _given(value)
        elif isinstance(note, Flag) and not (value is None or value is False or value in ((), field.default)):
            flag = () if note.place or note.or_flag else (_flag_of(field, note),)
            yield flag, [] if value is True else [str(one) for one in (value if isinstance(value, tuple) else (value,))]


def _flag_of(field: Field[Any], note: Flag) -> str:
    return note.name or f"--{field.name.replace('_', '-')}"


def _fields(options: type) -> Iterator[tuple[Field[Any], Any, Flag | Group | None]]:
    """(field, its type without `None`, its Flag or Group)."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        kind, note = hints[field.name], None
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            note = next((one for one in notes if isinstance(one, (Flag, Group))), None)
        if get_origin(kind) in (Union, UnionType):
            kind = next(one for one in get_args(kind) if one is not type(None))
        yield field, kind, note


def _add(
    parser: argparse._ActionsContainer, field: Field[Any], kind: Any, note: Flag, words: Mapping[str, str], rare: bool
) -> None:
    flag = _flag_of(field, note)
    flag = words.get(flag, flag)
    is_required = field.default is MISSING
    default = None if is_required else field.default
    how: dict[str, Any] = {"default": default, "help": _help(note, default), "dest": field.name}
    several = get_origin(kind) is tuple
    if kind is bool:
        parser.add_argument(flag, *note.names, action="store_true", **how)
        return
    choices = note.choices() if callable(note.choices) else note.choices
    if get_origin(kind) is Literal:
        choices = get_args(kind)
    how |= {"choices": tuple(choices)} if choices else {}
    how |= {"type": _PARSED[get_args(kind)[0] if several else kind]} if get_origin(kind) is not Literal else {}
    how |= {"metavar": note.metavar} if note.metavar else {}
    if note.place or note.or_flag:
        count = "+" if several and is_required else "*" if several else None if is_required else "?"
        placed = {key: value for key, value in how.items() if key != "dest"} if note.place else how
        if note.or_flag:
            placed = placed | {"action": OneWay, "default": argparse.SUPPRESS}
            again = placed | {"help": "the same as a flag" if rare else argparse.SUPPRESS, "metavar": "FILE"}
            parser.add_argument(flag, *note.names, **again)
            parser.set_defaults(**{field.name: default})
        name = (field.name,) if note.place else ()
        parser.add_argument(*name, nargs=count, **placed)
        return
    if note.optional is not None:
        how |= {"nargs": "?", "const": note.optional}
    elif several:
        how["nargs"] = "+"
    parser.add_argument(flag, *note.names, required=is_required, **how)


def _help(note: Flag, default: Any) -> str:
    text = note.help() if callable(note.help) else note.help
    if text == argparse.SUPPRESS:
        return text
    tells = default not in (None, False, (), "") and "default" not in text
    return f"{text} (default {default})".replace("%", "%%") if tells else text.replace("%", "%%")
