"""Find a model in a file: the set of weights that it is, the prefix of its names, its head, other models around it.

Files nest weights, and hold several sets beside other data. A set is a mapping with tensors, named by the keys that
lead to it (`state.model_ema`), or keys that share a prefix. A root is the prefix before the names of a model:
`module.`, `teacher.backbone.`, or nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.pickled import Opaque
from swin_quant.base.progress import log
from swin_quant.checkpoint.names import WRAPPER, below
from swin_quant.config.timm import HEADS

_WRAPPER = re.compile(rf"({WRAPPER})*")
_HEAD = re.compile(rf"({'|'.join(map(re.escape, sorted(HEADS, key=len, reverse=True)))}|cls_head)\.(weight|bias)")
_MASKED = re.compile(r"((swin(v2)?\.)?embeddings\.)?mask_token|decoder\.\d+\.(weight|bias)")
# The root and the first norm of a Swin: Microsoft's and timm's names, timm's with `features_only`, transformers'
_SWIN = re.compile(
    r"((?:.*?\.)??)((swin(v2)?\.)?encoder\.layers\.0\.blocks\.0\.layernorm_before|layers[._]0\.blocks\.0\.norm1)\.weight"
)
_FEWEST = 0.5  # a root with fewer than this share of the best root's keys is no second model
EMA, RAW = "ema", "raw"

_DEEPEST = 6
_PREFERRED = ("state_dict_ema", "model_ema", "state_dict", "model")  # in the order of timm's loader
_RAW = (*_PREFERRED, "", "model_state_dict", "model_state", "module", "net", "network", "params", "weights", "student")
_AVERAGED = re.compile(r"(.*_)?(ema|swa|averaged?|teacher|momentum|target)(_.*)?", re.I)
_NO_MODEL = re.compile(r".*(optim|sched|scaler|rng|grad|criterion|loss|metric|hyper|config|args|history).*", re.I)
_LEAST = 0.1  # a set with fewer numbers than this share of the largest is no second model


def find_swin(state: Mapping[str, Tensor], asked: str, file: Path) -> tuple[dict[str, Tensor], str, bool]:
    """The Swin classifier in `state`, whatever wraps it, its root, and whether it is one of several.

    `state` comes back unchanged without one; `names` takes off a prefix of wrappers alone, with nothing beside it.
    """
    if len(masked := [key for key in state if _MASKED.fullmatch(key)]) > 1:
        log.info("%s: no part of the model, left out: %s", file, listed(masked, 3))
        state = {key: value for key, value in state.items() if key not in masked}

    def has_head(root: str) -> bool:
        return any(_HEAD.fullmatch(key.removeprefix(p)) for p, _ in _splits(root) for key in state if key.startswith(p))

    roots = dict.fromkeys(match[1] for match in map(_SWIN.fullmatch, state) if match)
    classifiers = [root for root in sorted(roots, key=len) if _WRAPPER.fullmatch(root) or has_head(root)]
    if not classifiers:
        return dict(state), "", False
    found, root = _below(state, classifiers, asked, file, _HEAD.fullmatch)
    several = len(classifiers) > 1
    if len(found) == len(state) and _WRAPPER.fullmatch(root):
        return dict(state), "", several
    if root and not any(key.startswith("head.") for key in found):
        found = {f"head.{match[2]}" if (match := _HEAD.fullmatch(key)) else key: x for key, x in found.items()}
    return found, root, several


def find_model(state: Mapping[str, Tensor], wanted: Iterable[str], asked: str, file: Path) -> dict[str, Tensor]:
    """The entries of `state` with the names `wanted`, under the root that has most of them."""
    names = frozenset(wanted)
    votes = Counter(root for key in state for root, name in _splits(key) if name in names)
    best = max(votes.values(), default=0)
    left = sorted((r for r, count in votes.items() if count >= _FEWEST * best), key=lambda r: (-votes[r], len(r)))
    return _below(state, left, asked, file, names.__contains__)[0] if left else dict(state)


def _splits(key: str) -> list[tuple[str, str]]:
    """Each prefix of a key that ends in a dot, beginning with the empty one, and the rest."""
    parts = key.split(".")
    return [(".".join([*parts[:at], ""]), ".".join(parts[at:])) for at in range(len(parts))]


def _below(
    state: Mapping[str, Tensor], roots: Sequence[str], asked: str, file: Path, is_own: Callable[[str], object]
) -> tuple[dict[str, Tensor], str]:
    """The entries under one of `roots`, with entries beside it that have the model's own names; and the root."""
    name = choose_set(file, {root[:-1]: below(state, root) for root in roots}, asked)
    root = f"{name}." if name else ""
    if not root:
        others = tuple(each for each in roots if each)
        return {key: value for key, value in state.items() if not key.startswith(others)}, root
    found: dict[str, Tensor] = {}
    taken: set[str] = set()
    for above, _ in reversed(_splits(root)):
        for key, value in state.items():
            short = key.removeprefix(above)
            if key.startswith(above) and short not in found and (above == root or is_own(short)):
                found[short] = value
                taken.add(key)
    if beside := [key for key in state if key not in taken]:
        log.info("%s: the model is under %s*, left out: %s", file, root, listed(beside, 3))
    return found, root


def sets_in(content: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[str, Mapping[Any, Any]]:
    """Every mapping in `content` with tensors that may be a model, by the keys that lead there ("": itself)."""
    found = {".".join(path): content} if any(map(is_tensor, content.values())) else {}
    for key, value in content.items():
        inside = isinstance(value, Mapping) and isinstance(key, str) and not _NO_MODEL.fullmatch(key)
        if inside and len(path) < _DEEPEST:
            found |= sets_in(value, (*path, key))
    return found


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or stands for one that could not be read."""
    return isinstance(value, Tensor) or (isinstance(value, Opaque) and value.is_tensor)


def choose_set(file: Path, states: Mapping[str, Mapping[str, Tensor]], asked: str) -> str:
    """The name of the set that is the model: one that is `asked`, else the most usual one. A choice is logged.

    SwinQuantError where two sets could be the model.
    """

    def rank(name: str) -> int:
        parts = name.split(".")
        if _is_averaged(name):
            return _RAW.index(parts[0]) if parts[0] in _PREFERRED else len(_RAW) + 1
        return min((_RAW.index(part) for part in parts if part in _RAW), default=len(_RAW))

    shapes = {name: {key: tuple(x.shape) for key, x in each.items()} for name, each in states.items()}
    sizes = {name: sum(map(math.prod, each.values())) for name, each in shapes.items()}
    least = _LEAST * max(sizes.values())
    large = [name for name, size in sizes.items() if size >= least or (name and rank(name) != len(_RAW))]
    left = large
    if asked:
        left = [one for one in states if one == asked] or [one for one in large if satisfies(one, asked)] or large
    best = min(map(rank, left))
    first = [name for name in left if rank(name) == best]
    if (teacher := re.sub(r"\bstudent\b", "teacher", first[0])) in {*left} - {*first}:
        first = [teacher] if shapes[teacher] == shapes[first[0]] else [teacher, *first]
    if len(first) > 1:
        raise SwinQuantError(f"{file}: {_shown(first)} could each be the model: choose one by ‹weights› NAME")
    if others := [name for name in large if name != first[0]]:
        choice = f"{_shown(first)} is taken, not {_shown(others)} (‹weights› chooses)"
        log.warning("%s: holds several sets of weights: %s", file, choice)
    return first[0]


def satisfies(name: str, asked: str) -> bool:
    """Whether `asked` means the set `name`."""
    return _is_averaged(name) == (asked == EMA) if asked in (EMA, RAW) else f".{asked}." in f".{name}."


def _is_averaged(name: str) -> bool:
    return any(_AVERAGED.fullmatch(part) for part in name.split("."))


def _shown(names: Iterable[str]) -> str:
    return listed(name or "the keys without a prefix" for name in names)
