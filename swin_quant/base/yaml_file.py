"""Reading YAML that a user wrote, as plain data: mappings with text as keys, lists, text, numbers, booleans, null.

The rest of YAML is refused, since some lines of it make gigabytes or objects: aliases, merge keys, tags, more than one
document. Depth, size and digits are bounded. Errors are one line with file and place.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean
from swin_quant.base.files import read_bounded
from swin_quant.base.reading import reads

_MAX_BYTES = 1 << 20
_MAX_DEPTH, _MAX_VALUES, _MAX_DIGITS = 32, 10_000, 64

# The values of unquoted text, as in YAML 1.1 without octal and sexagesimal numbers and dates. `1e-4` is text there.
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9][0-9_]*"), int),
    (re.compile(r"[-+]?0x[0-9a-fA-F]+"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


@reads("YAML file")
def read_yaml(path: Path, what: str) -> Any:
    """The content of `path`; `what` names its kind in errors, e.g. "configuration file". Raises UsageError."""
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: a {what} ends in .yaml or .yml")
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such {what}")
    try:
        return _plain(read_bounded(path, what, _MAX_BYTES))
    except SwinQuantError as error:
        raise UsageError(str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{path}: not valid YAML{where}: {problem}") from error


def shipped_or_file(name_or_path: str, shipped: Iterable[Path], what: str) -> Path:
    """The file among `shipped` with that name (its stem), else the user's YAML file with that name."""
    names = {path.stem: path for path in shipped}
    path = names.get(name_or_path, Path(name_or_path))
    if path.suffix not in (".yaml", ".yml"):
        hint = did_you_mean(name_or_path, names) or f": give {', '.join(names)} or a .yaml file"
        raise UsageError(f"no {what} {name_or_path!r}{hint}")
    return path


@dataclass
class _Open:
    """An unfinished mapping or list; `key` is the next value's."""

    content: dict[str, Any] | list[Any]
    key: str | None = None

    @property
    def wants_key(self) -> bool:
        return isinstance(self.content, dict) and self.key is None

    def put(self, value: Any) -> None:
        if isinstance(self.content, list):
            self.content.append(value)
        elif self.key is not None:
            self.content[self.key], self.key = value, None


def _plain(text: bytes) -> Any:
    """A document's data, built from the parser's events one by one, so that every bound holds before memory is used."""
    root: list[Any] = []
    stack = [_Open(root)]
    documents = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        documents += isinstance(event, yaml.DocumentStartEvent)
        values += isinstance(event, yaml.NodeEvent)
        if documents > 1:
            _refuse(event, "a second document begins: one is expected")
        if values > _MAX_VALUES:
            _refuse(event, f"more than {_MAX_VALUES:,} values")
        if isinstance(event, yaml.AliasEvent):
            _refuse(event, f"the alias *{event.anchor:.40}: aliases are not read, write the value again")
        if getattr(event, "tag", None):
            _refuse(event, f"the tag {event.tag:.60}: tags are not read")
        here = stack[-1]
        if isinstance(event, yaml.ScalarEvent):
            if here.wants_key:
                here.key = _key(event, here.content)
            else:
                here.put(_value(event))
        elif isinstance(event, yaml.CollectionStartEvent):
            if here.wants_key:
                _refuse(event, "a key must be text, not a list or a mapping")
            if len(stack) > _MAX_DEPTH:
                _refuse(event, f"nested more than {_MAX_DEPTH} levels deep")
            stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else []))
        elif isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
            stack[-1].put(here.content)
    return root[0] if root else None


def _key(event: yaml.ScalarEvent, mapping: Any) -> str:
    if event.value == "<<" and event.implicit[0]:
        _refuse(event, "merge keys (<<) are not read, write the values again")
    if event.value in mapping:
        _refuse(event, f"the key {event.value:.60} is given twice")
    return event.value


def _value(event: yaml.ScalarEvent) -> Any:
    text = event.value
    if not event.implicit[0]:  # quoted
        return text
    if text in _WORDS:
        return _WORDS[text]
    for pattern, number in _NUMBERS:
        if pattern.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                _refuse(event, f"a number of {len(text)} digits")
            return number(text)
    return text


def _refuse(event: yaml.Event, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
