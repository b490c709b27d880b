"""Choose the set of weights that is the model: files nest weights, and hold several sets beside other data.

A set is a mapping with tensors, named by the keys that lead to it (`state.model_ema`), or keys that share a prefix.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.checkpoint.pickled import Opaque

EMA, RAW = "ema", "raw"
Shapes = Mapping[str, tuple[int, ...]]

_DEEPEST = 6
_PREFERRED = ("state_dict_ema", "model_ema", "state_dict", "model")  # in the order of timm's loader
_RAW = (*_PREFERRED, "", "model_state_dict", "model_state", "module", "net", "network", "params", "weights", "student")
_AVERAGED = re.compile(r"(.*_)?(ema|swa|averaged?|teacher|momentum|target)(_.*)?", re.I)
_NO_MODEL = re.compile(r".*(optim|sched|scaler|rng|grad|criterion|loss|metric|hyper|config|args|history).*", re.I)
_LEAST = 0.1  # a set with fewer numbers than this share of the largest is no second model


def sets_in(content: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Every mapping in `content` with tensors that may be a model, by the keys that lead there ("": itself)."""
    return {".".join(path): found for path, found in _sets(content, ())}


def _sets(content: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    if any(is_tensor(value) for value in content.values()):
        yield path, content
    for key, value in content.items():
        inside = isinstance(value, Mapping) and isinstance(key, str) and not _NO_MODEL.fullmatch(key)
        if inside and len(path) < _DEEPEST:
            yield from _sets(value, (*path, key))


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or stands for one that could not be read."""
    return isinstance(value, Tensor) or (isinstance(value, Opaque) and value.is_tensor)


def choose_set(file: Path, sets: Mapping[str, Shapes], asked: str, last: bool = True) -> tuple[str, bool]:
    """The name of the set that is the model, and whether `asked` (ema, raw, a name, "") chose it. A choice is logged.

    UsageError where no set is `asked`, unless a later search may find it (not `last`); SwinQuantError where two sets
    could be the model.
    """
    left = _large(sets)
    if not asked:
        return _default(file, left), False
    if found := [name for name in sets if name == asked] or [name for name in left if satisfies(name, asked)]:
        return _default(file, {name: sets[name] for name in found}, among=sets), True
    if last:
        raise UsageError(f"{file}: ‹weights› {asked}: there is no such set of weights; it holds {_shown(left)}")
    return _default(file, left), False


def satisfies(name: str, asked: str) -> bool:
    """Whether `asked` means the set `name`."""
    return is_averaged(name) == (asked == EMA) if asked in (EMA, RAW) else f".{asked}." in f".{name}."


def is_averaged(name: str) -> bool:
    """Whether a set's name marks it as an average of weights."""
    return any(_AVERAGED.fullmatch(part) for part in name.split("."))


def _large(sets: Mapping[str, Shapes]) -> Mapping[str, Shapes]:
    sizes = {name: sum(map(math.prod, shapes.values())) for name, shapes in sets.items()}
    least = _LEAST * max(sizes.values(), default=0)
    return {name: shapes for name, shapes in sets.items() if sizes[name] >= least or (name and _is_known(name))}


def _default(file: Path, sets: Mapping[str, Shapes], among: Mapping[str, Shapes] | None = None) -> str:
    best = min(map(_rank, sets))
    first = [name for name in sets if _rank(name) == best]
    if (teacher := re.sub(r"\bstudent\b", "teacher", first[0])) in sets.keys() - {*first}:
        first = [teacher] if sets[teacher] == sets[first[0]] else [teacher, *first]
    if len(first) > 1:
        raise SwinQuantError(f"{file}: {_shown(first)} could each be the model: choose one by ‹weights› NAME")
    if others := [name for name in _large(among or sets) if name != first[0]]:
        choice = f"{_shown(first)} is taken, not {_shown(others)} (‹weights› chooses)"
        log.warning("%s: holds several sets of weights: %s", file, choice)
    return first[0]


def _rank(name: str) -> int:
    parts = name.split(".")
    if is_averaged(name):
        return _RAW.index(parts[0]) if parts[0] in _PREFERRED else len(_RAW) + 1
    return min((_RAW.index(part) for part in parts if part in _RAW), default=len(_RAW))


def _is_known(name: str) -> bool:
    return is_averaged(name) or any(part in _RAW for part in name.split("."))


def _shown(names: Any) -> str:
    return listed(name or "the keys without a prefix" for name in names)
