"""Notes in a signature for the command line that is generated from it: the notes of cyclopts, and `Fields`."""

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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


def as_command(name: str, function: Callable[..., Any], *more: str, **arguments: Any) -> str:
    """The command that calls a function with these arguments; those that have their default are left out.

    Args:
        name: Of the command.
        function: The function that it is made of.
        more: Further words, quoted already.
        arguments: By the function's names; a `Fields` argument is an object of its dataclass.
    """
    hints = get_type_hints(function, include_extras=True)
    placed: list[str] = []
    flags: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key not in arguments or arguments[key] is None:
            continue
        value, notes = arguments[key], _notes_of(hints[key])
        inside = next((note for note in notes if isinstance(note, Fields)), None)
        if inside is None:
            named = any(isinstance(note, Parameter) and note.name for note in notes)
            is_placed = (parameter.default is inspect.Parameter.empty or Positional in notes) and not named
            (placed if is_placed else flags).extend(_words(key, notes, value, parameter.default, is_placed))
            continue
        own = get_type_hints(inside.kind, include_extras=True)
        for field in fields(inside.kind):
            is_placed = field.name in inside.positional
            given = getattr(value, field.name)
            words = _words(field.name, _notes_of(own[field.name]), given, field.default, is_placed)
            (placed if is_placed else flags).extend(words)
    return " ".join(["swin-quant", name, shlex.join([*placed, *flags]), *more])


def _notes_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _words(name: str, notes: tuple[Any, ...], value: Any, default: Any, is_placed: bool) -> Iterator[str]:
    if value is None or value == default or value == ():
        return
    parameter = next((note for note in notes if isinstance(note, Parameter)), Parameter())
    if parameter.parse is False:
        return
    if not is_placed:
        flag = next(iter(parameter.name)) if parameter.name else f"--{name.replace('_', '-')}"
        yield flag if value is not False else flag.replace("--", "--no-", 1)
    if not isinstance(value, bool):
        yield from (str(one) for one in (value if isinstance(value, tuple | list) else [value]))
