"""Find a model among the keys of a file: under a prefix, its head beside it, entries of other models around it.

A root is the prefix before the names of a model: `module.`, `teacher.backbone.`, or nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.checkpoint.parts import choose_set
from swin_quant.checkpoint.unsupported import larger_model
from swin_quant.config.timm import HEADS

_WRAPPER = re.compile(r"((_orig_mod|module|model|net|network|_?model_ema|ema_model|ema|teacher|student)\.)*")
_OF_A_SWIN = re.compile(
    r"(patch_embed|absolute_pos_embed|layers[._]\d+\.(blocks\.\d+|downsample)|norm\.|"
    r"(swin(v2)?\.)?(embeddings\.|layernorm\.|encoder\.layers\.\d+\.blocks\.\d+\.(attention|layernorm_|interm|output)))"
)
_BLOCK = re.compile(r"(swin(v2)?\.)?(encoder\.)?layers[._]0\.blocks\.0\.")
_HEAD = re.compile(rf"({'|'.join(map(re.escape, sorted(HEADS, key=len, reverse=True)))}|cls_head)\.(weight|bias)")
_FEWEST = 0.5  # a root with fewer than this share of the best root's keys is no second model


@dataclass(frozen=True)
class FoundModel:
    """A model's entries without their root, and the root; `user_chose`: the user named it; `several`: one of many."""

    state: dict[str, Tensor]
    root: str = ""
    user_chose: bool = False
    several: bool = False


def find_swin(state: Mapping[str, Tensor], asked: str, file: Path) -> FoundModel:
    """The Swin classifier in `state`, whatever wraps it; `state` unchanged without one, or for a larger model.

    `names` takes off a prefix of wrappers alone, with nothing beside it.
    """
    roots = _roots(state, lambda name: _OF_A_SWIN.match(name) is not None)
    swins = {root for key in state for root, name in _splits(key) if _BLOCK.match(name)}
    whole_ones = [root for root in roots if root in swins and (_WRAPPER.fullmatch(root) or _head_of(state, root))]
    if not whole_ones or larger_model(state):
        return FoundModel(dict(state))
    found = _below(state, whole_ones, asked, file, _HEAD.fullmatch)
    if len(found.state) == len(state) and _WRAPPER.fullmatch(found.root):
        return replace(found, state=dict(state), root="")
    if found.root and not any(key.startswith("head.") for key in found.state):
        renamed = {f"head.{match[2]}" if (match := _HEAD.fullmatch(key)) else key: v for key, v in found.state.items()}
        return replace(found, state=renamed)
    return found


def find_model(state: Mapping[str, Tensor], wanted: Iterable[str], asked: str, file: Path) -> FoundModel:
    """The entries of `state` with the names `wanted`, under the root that has most of them."""
    names = frozenset(wanted)
    roots = _roots(state, names.__contains__)
    return _below(state, roots, asked, file, names.__contains__) if roots else FoundModel(dict(state))


def _roots(state: Mapping[str, Tensor], is_own: Callable[[str], bool]) -> list[str]:
    """The prefixes of a model's names, one for each model, the one with most keys first."""
    votes = Counter(root for key in state for root, name in _splits(key) if is_own(name))
    best = max(votes.values(), default=0)
    left = sorted((r for r, count in votes.items() if count >= _FEWEST * best), key=lambda r: (-votes[r], len(r)))
    found: list[str] = []
    for root in left:
        if not any(_same_model(root, other) for other in found):
            found.append(root)
    return found


def _same_model(one: str, other: str) -> bool:
    """Whether one root is below the other by names of the model's parts, not of a wrapper."""
    inner, outer = sorted((one, other), key=len, reverse=True)
    return inner.startswith(outer) and _WRAPPER.fullmatch(inner.removeprefix(outer)) is None


def _splits(key: str) -> Iterator[tuple[str, str]]:
    parts = key.split(".")
    return ((".".join([*parts[:at], ""]), ".".join(parts[at:])) for at in range(len(parts)))


def _head_of(state: Mapping[str, Tensor], root: str) -> bool:
    names = (key.removeprefix(above) for above in _above(root) for key in state if key.startswith(above))
    return any(map(_HEAD.fullmatch, names))


def _above(root: str) -> list[str]:
    """The root, then each shorter prefix, down to the empty one."""
    parts = root.split(".")[:-1]
    return [".".join([*parts[:at], ""]) if at else "" for at in range(len(parts), -1, -1)]


def _below(
    state: Mapping[str, Tensor], roots: Sequence[str], asked: str, file: Path, is_own: Callable[[str], object]
) -> FoundModel:
    """The entries under one of `roots`, and entries beside it with the model's own names."""
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    sets = {r[:-1]: {key.removeprefix(r): shapes[key] for key in state if key.startswith(r)} for r in roots}
    name, user_chose = choose_set(file, sets, asked)
    root, several = f"{name}." if name else "", len(roots) > 1
    if not root:
        others = tuple(each for each in roots if each)
        return FoundModel({k: v for k, v in state.items() if not k.startswith(others)}, root, user_chose, several)
    found: dict[str, Tensor] = {}
    taken: set[str] = set()
    for above in _above(root):
        for key, value in state.items():
            short = key.removeprefix(above)
            if key.startswith(above) and short not in found and (above == root or is_own(short)):
                found[short] = value
                taken.add(key)
    if beside := [key for key in state if key not in taken]:
        log.info("%s: the model is under %s*, left out: %s", file, root, listed(beside, 3))
    return FoundModel(found, root, user_chose, several)
