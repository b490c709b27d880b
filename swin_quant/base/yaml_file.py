"""Reading YAML that a user wrote, as plain data: mappings with text as keys, lists, text, numbers, booleans, null.

The rest of YAML is refused, since some lines of it make gigabytes or objects: aliases, merge keys, tags, more than one
document. Depth, size and digits are bounded. Errors are one line with file and place.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml

from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean
from swin_quant.base.files import near, read_bounded
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
        raise UsageError(f"{path}: no such {what}{near(path)}")
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


def _plain(text: bytes) -> Any:
    events = _events(text)
    first = next(events, None)
    found = None if first is None else _value(first, events)
    deque(events, 0)  # refuses what follows
    return found


def _events(text: bytes) -> Iterator[yaml.Event]:
    """The events of values and ends, one by one, so that every bound holds before memory is used."""
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
        if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            yield event


def _value(event: yaml.Event, events: Iterator[yaml.Event], depth: int = 0) -> Any:
    """The value that begins with `event`, of which `events` give the rest."""
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if depth >= _MAX_DEPTH:
        _refuse(event, f"nested more than {_MAX_DEPTH} levels deep")
    inside = takewhile(lambda one: not isinstance(one, yaml.CollectionEndEvent), events)
    if isinstance(event, yaml.SequenceStartEvent):
        return [_value(one, events, depth + 1) for one in inside]
    found: dict[str, Any] = {}
    for key in inside:
        if not isinstance(key, yaml.ScalarEvent):
            _refuse(key, "a key must be text, not a list or a mapping")
        if key.value == "<<" and key.implicit[0]:
            _refuse(key, "merge keys (<<) are not read, write the values again")
        if key.value in found:
            _refuse(key, f"the key {key.value:.60} is given twice")
        found[key.value] = _value(next(events), events, depth + 1)
    return found


def _scalar(event: yaml.ScalarEvent) -> Any:
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
