"""Writing values into the tree: every key known, every value of its key's type, nothing ever evaluated.

yacs would evaluate strings and take None for anything; so text is read here, as the type that its key has.
"""

import difflib
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.defaults import defaults
from swin_quant.config.families import families

# A value of the type where the default does not show it.
_EXAMPLES: dict[str, Any] = {
    "AUG.CUTMIX_MINMAX": (0.0, 1.0),
    "TRAIN.LR_SCHEDULER.MULTISTEPS": [0],
}
_OPTIONAL = ("AUG.CUTMIX_MINMAX", "AUG.AUTO_AUGMENT")
_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes if it reads as another)",
}
show = reprlib.Repr()  # of values in one-line messages
show.maxlevel, show.maxstring, show.maxother = 2, 80, 80


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a section."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@dataclass(frozen=True)
class _Keys:
    """Every key with a value of its type, those that may be None, and the names of sections."""

    types: Mapping[str, Any]
    optional: frozenset[str]
    sections: frozenset[str]


@cache
def _keys(known: tuple[str, ...]) -> _Keys:
    """The keys of the tree with the sections of the `known` families."""
    optional = {
        f"MODEL.{families()[name].section}.{key}": v for name in known for key, v in families()[name].optional.items()
    }
    types = dict(leaves(defaults())) | _EXAMPLES | optional
    sections = {key.rsplit(".", n)[0] for key in types for n in range(1, key.count(".") + 1)}
    return _Keys(types, frozenset({*_OPTIONAL, *optional}), frozenset(sections))


def need(holds: bool, source: str, problem: str) -> None:
    """UsageError that names the source, unless it holds."""
    if not holds:
        raise UsageError(f"{source}: {problem}")


def need_numbers(key: str, value: Any, most: float, source: str) -> None:
    """UsageError unless `value`, or each in a list, is above 0 and at most `most`."""
    numbers = value if isinstance(value, list) else [value]
    need(min(numbers, default=0) > 0, source, f"{key} is {show.repr(value)}, but must be positive")
    need(max(numbers) <= most, source, f"{key} is {show.repr(value)}, but must be at most {most}")


def merge(cfg: CfgNode, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    """Write `tree` into `cfg`: nested sections or dotted keys, every key known and every value of its key's type."""
    known = _keys(tuple(families()))
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known.sections and isinstance(value, Mapping):
            merge(cfg, value, source, f"{key}.")
        elif key in known.sections:
            raise UsageError(f"{source}: {key} is a section of keys, not {show.repr(value)}")
        elif key == "BASE" and isinstance(value, list) and not any(value):
            continue
        elif key == "BASE":
            raise UsageError(f"{source}: BASE works only in a YAML file")
        elif key not in known.types:
            close = difflib.get_close_matches(key.upper(), [*known.types, *sorted(known.sections)], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{source}: unknown key {show.repr(key)[1:-1]}{hint}")
        else:
            *sections, leaf = key.split(".")
            node = cfg
            for section in sections:
                node = node[section]
            node[leaf] = _typed(key, value, source, known)


def _typed(key: str, value: Any, source: str, known: _Keys) -> Any:
    """`value` as the type of `key`."""
    example = known.types[key]
    optional = key in known.optional
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    try:
        return _convert(value, example)
    except (ValueError, OverflowError) as error:
        forms: dict[type[Any], str] = {list: "a list, each entry ", tuple: "a pair, each "}
        form = forms.get(type(example), "")
        noun = form + _NOUNS[type(example[0] if form else example)]
        either = " or None" if optional else ""
        raise UsageError(f"{source}: {key} must be {noun}{either}, not {show.repr(value)}") from error


def _convert(value: Any, example: Any) -> Any:
    """`value` as the type of `example`; text is read as that type (`1e-8` in YAML is text), nothing is evaluated."""
    kind = type(example)
    if kind in (list, tuple):
        if isinstance(value, str) and (inside := re.fullmatch(r"\s*(?:\[(.*)\]|\((.*)\))\s*", value)):
            value = [entry for entry in (inside[1] or inside[2] or "").split(",") if entry.strip()]
        if not isinstance(value, list | tuple) or (kind is tuple and len(value) != len(example)):
            raise ValueError(value)
        return kind(_convert(entry, example[0]) for entry in value)
    if isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.strip().lower())
    elif isinstance(value, str) and kind is not str:
        value = kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)) or (kind is str and "\0" in value):
        raise ValueError(value)
    return value
