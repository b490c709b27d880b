"""Notes in a signature for the command line that is generated from it: the notes of cyclopts, and `Fields`."""

import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Parameter as Parameter


@dataclass(frozen=True)
class Fields:
    """The argument is given on the command line as the fields of a dataclass, a flag each.

    `calibrate(model: Annotated[Model | Path | ModelFile, Fields(ModelFile)])` takes any of the three in Python; the
    command has the flags `--cfg`, `--weights` and the rest of `ModelFile`, and calls it with a `ModelFile`.

    Args:
        kind: The dataclass. Its docstring has the help of the flags, under `Args:`.
        title: The title above the flags in `--help`.
        positional: The fields that may also be given without a flag, in this order.
        without: The fields that have no flag here.
    """

    kind: type
    title: str
    positional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Positional:
    """The argument may be given without a flag, though it has a default."""


@dataclass(frozen=True)
class CommandArgument:
    """An argument of a command: an argument of its function, or a field of that if `fields` says so.

    `default`: inspect.Parameter.empty where it must be given. `is_placed`: it may be given without a flag.
    """

    argument: str
    field: str
    hint: Any
    default: Any
    is_placed: bool
    fields: Fields | None = None

    @property
    def name(self) -> str:
        return self.field or self.argument

    @property
    def notes(self) -> list[Parameter]:
        """The notes for cyclopts in the hint."""
        return [note for note in _get_notes(self.hint) if isinstance(note, Parameter)]


def command_arguments(function: Callable[..., Any]) -> list[CommandArgument]:
    """The arguments of the command that is made of a function, in the order of its signature."""
    hints = get_type_hints(function, include_extras=True)
    found: list[CommandArgument] = []
    for key, parameter in inspect.signature(function).parameters.items():
        notes = _get_notes(hints[key])
        inside = next((note for note in notes if isinstance(note, Fields)), None)
        if inside is None:
            is_named = any(isinstance(note, Parameter) and note.name for note in notes)
            is_placed = (parameter.default is inspect.Parameter.empty or Positional in notes) and not is_named
            found.append(CommandArgument(key, "", hints[key], parameter.default, is_placed))
            continue
        own = get_type_hints(inside.kind, include_extras=True)
        for one in fields(inside.kind):
            if one.name not in inside.without:
                default = None if one.default is MISSING else one.default
                is_placed = one.name in inside.positional
                found.append(CommandArgument(key, one.name, own[one.name], default, is_placed, inside))
    return [one for one in found if not any(note.parse is False for note in one.notes)]


def as_command(name: str, function: Callable[..., Any], *more: str, **arguments: Any) -> str:
    """The command that calls a function with these arguments; those that have their default are left out.

    Args:
        name: Of the command.
        function: The function that it is made of.
        more: Further words, quoted already.
        arguments: By the function's names; a `Fields` argument is an object of its dataclass.
    """
    placed: list[str] = []
    flags: list[str] = []
    for one in command_arguments(function):
        value = arguments.get(one.argument)
        if value is not None and one.field:
            value = getattr(value, one.field)
        if value is None or value == one.default or value == ():
            continue
        if not one.is_placed:
            named = next((note.name for note in one.notes if note.name), None)
            flag = next(iter(named)) if named else f"--{one.name.replace('_', '-')}"
            flags.append(flag if value is not False else flag.replace("--", "--no-", 1))
        if not isinstance(value, bool):
            words = value if isinstance(value, tuple | list) else [value]
            (placed if one.is_placed else flags).extend(map(str, words))
    return " ".join(["swin-quant", name, shlex.join([*placed, *flags]), *more])


def _get_notes(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()
