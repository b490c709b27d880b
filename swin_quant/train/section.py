"""Frozen data that YAML and the command line can set, every field with a type and a range.

A key that is unknown, or a value that cannot be meant (an LR of 0, NaN), is an error of one line that names both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from swin_quant.base.errors import UsageError

S = TypeVar("S", bound="Section")


def number(
    default: float | tuple[float, ...] | None, above: float = -inf, least: float = -inf, most: float = inf
) -> Any:
    """A field of a recipe with the range of its values: `above` is left out of it, `least` and `most` are in it."""
    return field(default=default, metadata={"above": above, "least": least, "most": most})


def one_of(default: str, choices: Sequence[str]) -> Any:
    """A field of a recipe whose values are listed elsewhere."""
    return field(default=default, metadata={"choices": tuple(choices)})


@dataclass(frozen=True)
class Section:
    """A group of fields, checked against their types and ranges whenever one is made."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, bounds = getattr(self, item.name), item.metadata
            if value not in bounds.get("choices", (value,)):
                choices = ", ".join(bounds["choices"])
                raise UsageError(f"{item.name} is {value!r:.60}, but must be one of {choices}")
            if "above" not in bounds or value is None:
                continue
            for entry in value if isinstance(value, tuple) else (value,):
                if not isfinite(entry) or entry <= bounds["above"] or not bounds["least"] <= entry <= bounds["most"]:
                    raise UsageError(f"{item.name} is {value}, but must be {_range(bounds)}")


def section_of(kind: type[S], data: Any, source: str, prefix: str = "") -> S:
    """Check plain data and make a `kind` of it; UsageError names `source` and the key, which is below `prefix`."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{source}: {prefix.rstrip('.') or 'a recipe'} must be a mapping, not {data!r:.60}")
    types, values = get_type_hints(kind), {}
    for key, value in data.items():
        where = f"{source}: {prefix}{key}"
        if key not in types:
            raise UsageError(f"{source}: {unknown_key(f'{prefix}{key}', [prefix + name for name in types])}")
        values[key] = _value(types[key], value, where, f"{prefix}{key}.", source)
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{source}: {prefix}{error}") from error


def _value(kind: Any, value: Any, where: str, prefix: str, source: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Section):
        return section_of(kind, value, source, prefix)
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise UsageError(f"{where} is {value!r:.60}, but must be one of {', '.join(options)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(options):
            raise UsageError(f"{where} must be {len(options)} numbers, not {value!r:.60}")
        return tuple(_scalar(options[0], entry, where) for entry in value)
    if type(None) in options:
        return None if value in (None, "none") else _scalar(options[0], value, where)
    return _scalar(kind, value, where)


def _scalar(kind: type[Any], value: Any, where: str) -> Any:
    """Text is read as a number where one is due: YAML takes `1e-4` for text, and so does a command line."""
    noun = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    try:
        if isinstance(value, str) and kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if isinstance(value, str) and kind is not str:
            return kind(value)
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
    except (ValueError, KeyError, OverflowError):
        pass
    raise UsageError(f"{where} must be {noun}, not {value!r:.60}")


def _range(bounds: Mapping[str, float]) -> str:
    words = [f"above {bounds['above']:g}"] if bounds["above"] > -inf else []
    words += [f"at least {bounds['least']:g}"] if bounds["least"] > -inf else []
    words += [f"at most {bounds['most']:g}"] if bounds["most"] < inf else []
    return " and ".join(words)


def unknown_key(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    return f"unknown key {key!r:.80}" + (f"; did you mean {close[0]}?" if close else "")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all that is not a mapping."""
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def plain(value: Any) -> Any:
    """`value` with lists for tuples, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
