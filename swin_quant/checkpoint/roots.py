"""Find a model in a file: the set of weights that it is, the prefix of its names, its head, other models around it.

Files nest weights, and hold several sets beside other data. A set is a mapping with tensors, named by the keys that
lead to it (`state.model_ema`), or keys that share a prefix. A root is the prefix before the names of a model:
`module.`, `teacher.backbone.`, or nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.pickled import Opaque
from swin_quant.base.progress import log
from swin_quant.checkpoint.geometry import larger_model
from swin_quant.checkpoint.names import below
from swin_quant.config.timm import HEADS

WRAPPER = r"(_orig_mod|module|model|net|network|_?model_ema|ema_model|ema|teacher|student)\."
_WRAPPER = re.compile(rf"({WRAPPER})*")
_HEAD = re.compile(rf"({'|'.join(map(re.escape, sorted(HEADS, key=len, reverse=True)))}|cls_head)\.(weight|bias)")
_MASKED = re.compile(r"((swin(v2)?\.)?embeddings\.)?mask_token|decoder\.\d+\.(weight|bias)")
_FEWEST = 0.5  # a root with fewer than this share of the best root's keys is no second model
EMA, RAW = "ema", "raw"

_DEEPEST = 6
_PREFERRED = ("state_dict_ema", "model_ema", "state_dict", "model")  # in the order of timm's loader
_RAW = (*_PREFERRED, "", "model_state_dict", "model_state", "module", "net", "network", "params", "weights", "student")
_AVERAGED = re.compile(r"(.*_)?(ema|swa|averaged?|teacher|momentum|target)(_.*)?", re.I)
_NO_MODEL = re.compile(r".*(optim|sched|scaler|rng|grad|criterion|loss|metric|hyper|config|args|history).*", re.I)
_LEAST = 0.1  # a set with fewer numbers than this share of the largest is no second model


@dataclass(frozen=True)
class Publisher:
    """Keys that every Swin of a publisher has: of each block, by stage and number, of the patch embedding, and of the
    final norm, which a backbone lacks."""

    name: str
    block: str
    embedding: str
    norm: str = ""

    def find_roots(self, state: Iterable[str], anchor: str = "") -> list[str]:
        """The roots under which a key lies, by default that of the first block."""
        anchor = anchor or self.block.format(0, 0)
        return [key.removesuffix(anchor) for key in state if key == anchor or key.endswith(f".{anchor}")]

    def find_missing(self, state: Mapping[str, Any], root: str) -> tuple[list[str], int]:
        """The missing keys of a model under `root`, and how many are there: the first block of each stage, the last
        block, embedding and norm. The last stage is the deepest that any key names, or that the norm's width tells."""
        before, between, _ = self.block.split("{}")
        pattern = re.compile(rf"{re.escape(root + before)}(\d{{1,2}}){re.escape(between)}(\d{{1,4}})\.", re.ASCII)
        stages = {0: 0}
        for match in filter(None, map(pattern.match, state)):
            stages[int(match[1])] = max(stages.get(int(match[1]), 0), int(match[2]))
        deepest = max(stages)
        narrow, wide = (getattr(state.get(root + key), "shape", ()) for key in (self.embedding, self.norm))
        if narrow and wide and wide[0] > narrow[0] > 0:
            deepest = max(deepest, (wide[0] // narrow[0]).bit_length() - 1)
        blocks = [self.block.format(stage, 0) for stage in range(deepest + 1)]
        blocks.append(self.block.format(deepest, stages.get(deepest, 0)))
        keys = [root + key for key in dict.fromkeys(filter(None, [*blocks, self.embedding, self.norm]))]
        missing = [key for key in keys if key not in state]
        return missing, len(keys) - len(missing)


_CLASSIFIERS = (
    Publisher("Microsoft", "layers.{}.blocks.{}.norm1.weight", "patch_embed.proj.weight", "norm.weight"),
    Publisher("timm (features_only)", "layers_{}.blocks.{}.norm1.weight", "patch_embed.proj.weight"),
    *(
        Publisher(
            "transformers",
            f"{prefix}encoder.layers.{{}}.blocks.{{}}.layernorm_before.weight",
            f"{prefix}embeddings.patch_embeddings.projection.weight",
            f"{prefix}layernorm.weight",
        )
        for prefix in ("swin.", "swinv2.", "")
    ),
)
_OPENMMLAB = Publisher("OpenMMLab", "stages.{}.blocks.{}.norm1.weight", "patch_embed.projection.weight")
PUBLISHERS = (*_CLASSIFIERS, _OPENMMLAB)  # the last has backbones, which `backbones` finds


@dataclass(frozen=True)
class FoundModel:
    """A model's entries without their root, and the root; `user_chose`: the user named it; `several`: one of many."""

    state: dict[str, Tensor]
    root: str = ""
    user_chose: bool = False
    several: bool = False


def find_swin(state: Mapping[str, Tensor], asked: str, file: Path) -> FoundModel:
    """The Swin classifier in `state`, whatever wraps it; `state` unchanged without one, or for a larger model.

    Under each root lie the anchors of one publisher; if none has all, those with the fewest missing ones count.
    `names` takes off a prefix of wrappers alone, with nothing beside it.
    """
    if len(masked := [key for key in state if _MASKED.fullmatch(key)]) > 1:
        log.info("%s: no part of the model, left out: %s", file, listed(masked, 3))
        state = {key: value for key, value in state.items() if key not in masked}

    def has_head(root: str) -> bool:
        return any(_HEAD.fullmatch(key.removeprefix(p)) for p, _ in _splits(root) for key in state if key.startswith(p))

    missing = {root: len(one.find_missing(state, root)[0]) for one in _CLASSIFIERS for root in one.find_roots(state)}
    fewest = min(missing.values(), default=0)
    best = _apart(sorted((root for root, count in missing.items() if count == fewest), key=len))
    whole_ones = [root for root in best if _WRAPPER.fullmatch(root) or has_head(root)]
    if not whole_ones or larger_model(state):
        return FoundModel(dict(state))
    found = _below(state, whole_ones, asked, file, _HEAD.fullmatch)
    if len(found.state) == len(state) and _WRAPPER.fullmatch(found.root):
        return replace(found, state=dict(state), root="")
    if not found.root or any(key.startswith("head.") for key in found.state):
        return found
    renamed = {f"head.{match[2]}" if (match := _HEAD.fullmatch(key)) else key: v for key, v in found.state.items()}
    return replace(found, state=renamed)


def find_model(state: Mapping[str, Tensor], wanted: Iterable[str], asked: str, file: Path) -> dict[str, Tensor]:
    """The entries of `state` with the names `wanted`, under the root that has most of them."""
    names = frozenset(wanted)
    votes = Counter(root for key in state for root, name in _splits(key) if name in names)
    best = max(votes.values(), default=0)
    left = sorted((r for r, count in votes.items() if count >= _FEWEST * best), key=lambda r: (-votes[r], len(r)))
    return _below(state, _apart(left), asked, file, names.__contains__).state if left else dict(state)


def nearest_publisher(state: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The publisher most of whose anchors are in `state` under one root, and the missing ones."""
    found = [
        (one.name, *one.find_missing(state, root))
        for one in PUBLISHERS
        for anchor in ("", one.embedding)
        for root in one.find_roots(state, anchor) or [""]
    ]
    name, missing, _ = max(found, key=lambda each: each[2])
    return name, missing


def _apart(roots: Sequence[str]) -> list[str]:
    """`roots` without those inside a model found earlier: below it by names of the model's parts, not of a wrapper."""
    found: list[str] = []
    for root in roots:
        pairs = [sorted((root, other), key=len) for other in found]
        if not any(b.startswith(a) and not _WRAPPER.fullmatch(b.removeprefix(a)) for a, b in pairs):
            found.append(root)
    return found


def _splits(key: str) -> list[tuple[str, str]]:
    """Each prefix of a key that ends in a dot, beginning with the empty one, and the rest."""
    parts = key.split(".")
    return [(".".join([*parts[:at], ""]), ".".join(parts[at:])) for at in range(len(parts))]


def _below(
    state: Mapping[str, Tensor], roots: Sequence[str], asked: str, file: Path, is_own: Callable[[str], object]
) -> FoundModel:
    """The entries under one of `roots`, and entries beside it with the model's own names."""
    name, user_chose = choose_set(file, {root[:-1]: below(state, root) for root in roots}, asked)
    root, several = f"{name}." if name else "", len(roots) > 1
    if not root:
        others = tuple(each for each in roots if each)
        return FoundModel({k: v for k, v in state.items() if not k.startswith(others)}, root, user_chose, several)
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
    return FoundModel(found, root, user_chose, several)


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


def choose_set(
    file: Path, states: Mapping[str, Mapping[str, Tensor]], asked: str, last: bool = True
) -> tuple[str, bool]:
    """The name of the set that is the model, and whether `asked` (ema, raw, a name, "") chose it. A choice is logged.

    UsageError where no set is `asked`, unless a later search may find it (not `last`); SwinQuantError where two sets
    could be the model.
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
    chosen: list[str] = []
    if asked:
        chosen = [name for name in states if name == asked] or [name for name in large if satisfies(name, asked)]
        if last and not chosen:
            raise UsageError(f"{file}: ‹weights› {asked}: there is no such set of weights; it holds {_shown(large)}")
    left = chosen or large
    best = min(map(rank, left))
    first = [name for name in left if rank(name) == best]
    if (teacher := re.sub(r"\bstudent\b", "teacher", first[0])) in {*left} - {*first}:
        first = [teacher] if shapes[teacher] == shapes[first[0]] else [teacher, *first]
    if len(first) > 1:
        raise SwinQuantError(f"{file}: {_shown(first)} could each be the model: choose one by ‹weights› NAME")
    if others := [name for name in large if name != first[0]]:
        choice = f"{_shown(first)} is taken, not {_shown(others)} (‹weights› chooses)"
        log.warning("%s: holds several sets of weights: %s", file, choice)
    return first[0], bool(chosen)


def satisfies(name: str, asked: str) -> bool:
    """Whether `asked` means the set `name`."""
    return _is_averaged(name) == (asked == EMA) if asked in (EMA, RAW) else f".{asked}." in f".{name}."


def _is_averaged(name: str) -> bool:
    return any(_AVERAGED.fullmatch(part) for part in name.split("."))


def _shown(names: Iterable[str]) -> str:
    return listed(name or "the keys without a prefix" for name in names)
