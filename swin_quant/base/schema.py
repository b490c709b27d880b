"""Untrusted plain data, checked against the annotations of a type: the one validator of this package.

A record is a dataclass or a TypedDict. Types are str, bool, int, float (finite; an int will do), Literal, list[T],
tuple[T, T], tuple[T, ...], dict[str, T], T | None, T | list[T] (or a tuple), Any and records;
`Annotated[T, within(least=1)]` says more. Errors are one line with source and key. (pydantic and msgspec: the first
takes as long to import as `--help` may, and wants another TypedDict before Python 3.12; neither names the keys of a
mapping.)
"""

import dataclasses
import functools
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, NoReturn, NotRequired

from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean, listed, one_line

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80
show = _short.repr  # a value in a one-line message
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Must:
    """A condition on a value beyond its type; None, where allowed, is exempt."""

    holds: Callable[[Any], bool]
    be: str


def within(above: float = -inf, least: float = -inf, most: float = inf, below: float = inf) -> Must:
    """A number in a range: `above` and `below` are left out of it, `least` and `most` are in it."""
    words = [f"above {above:g}"] if above > -inf else []
    words += [f"at least {least:.15g}"] if least > -inf else []
    words += [f"at most {most:.15g}"] if most < inf else []
    words += [f"below {below:g}"] if below < inf else []
    return Must(lambda value: above < value < below and least <= value <= most, " and ".join(words))


def counted(least: int, most: int) -> Must:
    """A list with a number of entries in this range."""
    return Must(lambda entries: least <= len(entries) <= most, f"a list of {least} to {most} entries")


def allow(choices: Collection[object]) -> Must:
    """One of these words or numbers."""
    return Must(lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


def checked(
    kind: Any,
    data: Any,
    source: str,
    key: str = "",
    *,
    text: bool = False,
    error: type[SwinQuantError] = SwinQuantError,
) -> Any:
    """`data` as a `kind`; `error` names `source` (a file) and the key, which is `key` or below it.

    With `text`, it is read as a number, a switch or a list where one is due, as of YAML (`1e-4` is text there) and
    command lines. Keys that a record does not have are refused.
    """
    return _Reading(source, text, error).value(kind, data, key)


def check_record(
    kind: Any,
    data: Any,
    source: str,
    key: str = "",
    lenient: bool = False,
    error: type[SwinQuantError] = SwinQuantError,
) -> Mapping[str, Any]:
    """Like `checked`, for a record that need not be built: returns its fields. If `lenient`, keys that it does not have
    are left out."""
    return _Reading(source, False, error, lenient).fields(kind, data, key)


def check_fields(record: Any) -> None:
    """UsageError unless the fields of a dataclass made in code fit their annotations."""
    for name, kind in get_fields(type(record))[0].items():
        value = _Reading("", False, UsageError).value(kind, getattr(record, name), name)
        object.__setattr__(record, name, value)  # it may be frozen; lists are tuples now, and 1 is 1.0 for a float


class SelfChecked:
    """A dataclass that checks its fields when it is made (`check_fields`)."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_limits(record: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """UsageError unless each of these options of a record is from the least to the most of its range."""
    for name, (least, most) in ranges.items():
        value = getattr(record, name)
        if not least <= value <= most:
            raise UsageError(f"‹{name}› {value}: must be from {least} to {most}")


def unknown_key(key: str, known: Collection[str]) -> str:
    """A problem in words, with what may have been meant."""
    return f"unknown key {key!r:.80}{did_you_mean(key, known) or f'; known are {listed(known, 20)}'}"


def plain(value: Any) -> Any:
    """`value` with lists for tuples, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read_fields(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """The keys of a record with their types, and those that may be absent: a computed default is for making it only."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        inner = {
            name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is NotRequired
        }
        return hints | inner, set(kind.__optional_keys__)
    fields, absent = dataclasses.fields(kind), dataclasses.MISSING
    made = {f.name for f in fields if f.default_factory in (list, dict) or _is_record(f.default_factory)}
    constant = made | {field.name for field in fields if field.default is not absent}
    return {field.name: hints[field.name] for field in fields}, constant


get_fields: Callable[[Any], tuple[dict[str, Any], set[str]]] = functools.cache(_read_fields)


def _is_record(kind: Any) -> bool:
    return typing.is_typeddict(kind) or dataclasses.is_dataclass(kind)


@dataclass(frozen=True)
class _Reading:
    """One walk through plain data, no deeper than its schema."""

    source: str
    text: bool
    error: type[SwinQuantError]
    lenient: bool = False
    also: str = ""  # further values that are allowed

    def refuse(self, problem: str) -> NoReturn:
        raise self.error(f"{self.source}: {problem}" if self.source else problem)

    def value(self, kind: Any, data: Any, key: str) -> Any:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return data
        if origin is Annotated:
            value = self.value(inner[0], data, key)
            for must in inner[1:]:
                if value is not None and not must.holds(value):
                    self.refuse(f"{key} is {show(value)}, but must be {must.be}")
            return value
        if origin in (types.UnionType, typing.Union):
            if type(None) not in inner:
                return self.value(inner[self._is_several(data)], data, key)
            absent = data is None or (self.text and isinstance(data, str) and data.lower() in ("none", "null"))
            return None if absent else dataclasses.replace(self, also=" or None").value(inner[0], data, key)
        if origin is Literal:
            return self.value(Annotated[str, allow(inner)], data, key)
        if _is_record(kind):
            if dataclasses.is_dataclass(kind) and isinstance(data, typing.cast(type, kind)):
                return data
            make: Callable[..., Any] = dict if typing.is_typeddict(kind) else kind
            return make(**self.fields(kind, data, key))
        if origin is dict:
            content = self._check_kind(Mapping, data, key, "a mapping")
            if odd := [name for name in content if inner[0] is str and not isinstance(name, str)]:
                self.refuse(f"{key or 'the content'} has the key {show(odd[0])}, which must be text")
            return {name: self.value(inner[1], item, f"{key}.{_shown(name)}") for name, item in content.items()}
        if origin in (list, tuple):
            return self._several(origin, inner, data, key)
        return self._scalar(kind, data, key)

    def fields(self, kind: Any, data: Any, key: str) -> dict[str, Any]:
        """The values of a record's fields, by name."""
        content, (known, optional) = self._check_kind(Mapping, data, key, "a mapping"), get_fields(kind)
        prefix = f"{key}." if key else ""
        surplus = sorted(prefix + _shown(name) for name in content if name not in known)
        if surplus and not self.lenient:  # before what is lacking: it may be that, misspelt
            self.refuse(unknown_key(surplus[0], [prefix + name for name in known]))
        if lacking := sorted(prefix + name for name in known.keys() - optional - content.keys()):
            self.refuse(f"lacks {listed(lacking)}")
        return {name: self.value(known[name], content[name], prefix + name) for name in known if name in content}

    def _is_several(self, data: Any) -> bool:
        """Whether `data` is a list, or text that reads as one."""
        in_text = self.text and isinstance(data, str) and data.strip()[:1] + data.strip()[-1:] in ("[]", "()")
        return in_text or isinstance(data, (list, tuple))

    def _several(self, origin: type[Any], inner: tuple[Any, ...], data: Any, key: str) -> Any:
        count = len(inner) if origin is tuple and inner[-1] is not Ellipsis else None
        noun = "a list" if count is None else f"{count} values" if count > 1 else "a list of 1 value"
        if isinstance(data, str) and self._is_several(data):
            data = [entry.strip() for entry in data.strip()[1:-1].split(",") if entry.strip()]
        entries = self._check_kind((list, tuple), data, key, noun)
        if count not in (None, len(entries)):
            self.refuse(f"{key} must be {noun}{self.also}, not {show(data)}")
        inside = dataclasses.replace(self, also="")
        return origin(inside.value(inner[0], entry, f"{key}[{index}]") for index, entry in enumerate(entries))

    def _check_kind(self, kind: Any, data: Any, key: str, noun: str) -> Any:
        if not isinstance(data, kind):
            self.refuse(f"{key or 'the content'} must be {noun}{self.also}, not {show(data)}")
        return data

    def _scalar(self, kind: Any, data: Any, key: str) -> Any:
        value = data
        if self.text and isinstance(data, str) and kind is not str:
            try:
                value = _WORDS[data.strip().lower()] if kind is bool else kind(data)
            except (ValueError, KeyError):
                value = None
        finite = type(value) in (int, float) and abs(value) <= sys.float_info.max  # also for an int of any length
        if kind is float and finite:
            return float(value)
        if kind is float or type(value) is not kind:
            noun = _NOUNS[kind] + (", in quotes if it reads as another" if self.text and kind is str else "")
            self.refuse(f"{key or 'the content'} must be {noun}{self.also}, not {show(data)}")
        return value


def _shown(name: Any) -> str:
    return one_line(str(name)[:60])
