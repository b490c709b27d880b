"""Rename parameters to Microsoft's names (docs/reference, section 1.2), the one convention inside this package.

timm's patch merging concatenates the four neighbours in Microsoft's order, (0,0), (1,0), (0,1), (1,1), and its V2
keeps `q_bias` and `v_bias` apart as Microsoft does: only names change, no tensor. transformers names the parts of a
block as BERT's; its newer V1 modules have other names in memory, and both are read. Its q, k and v are three linears,
and one here, with rows in that order; V2's k has no bias in either. MindSpore has names of mindcv
(https://github.com/mindspore-lab/mindcv) and of its model zoo, for Swin and ResNet, which differ in heads and
shortcuts; its q, k and v are apart, too.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint.conventions import TIMM_FEATURES, TRANSFORMERS
from swin_quant.config.defaults import families

Entry = TypeVar("Entry")
Replacement: TypeAlias = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Convention:
    """A way of naming, in use when a key matches `seen` and none matches `unseen`; `pattern` -> `to` undoes it."""

    name: str
    seen: str
    pattern: str
    to: str | Replacement
    unseen: str = r"(?!)"

    def used_by(self, keys: Iterable[str]) -> bool:
        """Whether `keys` are named this way."""
        keys = list(keys)
        return any(re.search(self.seen, key) for key in keys) and not any(re.search(self.unseen, key) for key in keys)


INSERTED = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
WRAPPERS = tuple(  # in any order and depth
    Convention(name, rf"^{word}\.", rf"^{word}\.", "", unseen=rf"^(?!{word}\.)")
    for name, word in (
        ("DistributedDataParallel", "module"),
        ("torch.compile", "_orig_mod"),
        ("Lightning", "model"),
        ("a wrapper's", "(net|network|ema|model_ema|ema_model|student|teacher)"),
    )
)
CONVENTIONS = (
    Convention("timm features", r"^layers_0\.", *TIMM_FEATURES.renames[0]),
    Convention("SimMIM", r"\.attn\.rpe_mlp\.", r"\.attn\.rpe_mlp\.", ".attn.cpb_mlp."),
    Convention(  # for a Swin alone: the heads of timm's other models have this name here, too
        "timm",
        r"^head\.fc\.",
        r"^head\.fc\.",
        "head.",
        unseen=r"^(?!(head|layers|patch_embed|norm|absolute_pos_embed)\b)",
    ),
    Convention(  # Microsoft ends stage i with its downsample, newer timm begins stage i + 1 with it
        "timm",
        r"^layers\.[1-9]\d*\.downsample\.",
        r"^layers\.(\d+)\.downsample\.",
        lambda match: f"layers.{int(match[1]) - 1}.downsample.",
        unseen=r"^layers\.0\.downsample\.",
    ),
)

_TRANSFORMERS_SEEN = re.compile(r"(swin(v2)?\.)?encoder\.layers\.\d+\.blocks\.\d+\.(attention|layernorm_before)\.")
_PART = re.compile(r"(.*\.attn\.)[qkv]\.(weight|bias)")


def below(entries: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """The entries under a prefix, by the rest of their keys."""
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}


def to_microsoft(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """`state` under Microsoft's names, and the names of the conventions that were undone ("microsoft" if none).

    A key that no convention knows is left alone. Two keys that would become one are an error.
    """
    found: list[str] = []
    while used := [wrapper for wrapper in WRAPPERS if wrapper.used_by(state)]:
        found += [wrapper.name for wrapper in used]
        state = renamed(state, used[0].name, (used[0].pattern, used[0].to))
    for convention in CONVENTIONS:
        if convention.used_by(state):
            found.append(convention.name)
            state = renamed(state, convention.name, (convention.pattern, convention.to))
    if any(map(_TRANSFORMERS_SEEN.match, state)):
        found.append("transformers")
        state = _joined(renamed(state, "transformers", *TRANSFORMERS.renames))
    if is_mindspore(state):
        found.append(MINDSPORE)
        state = from_mindspore(state)
    for family in families().values():
        if family.rename:
            state, undone = family.rename(state)
            found += undone
    return state, " + ".join(dict.fromkeys(found)) or "microsoft"


def renamed(state: Mapping[str, Tensor], convention: str, *table: tuple[str, str | Replacement]) -> dict[str, Tensor]:
    """`state` with every pattern of `table` replaced in its keys. SwinQuantError for two keys that become one."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        key = _replaced(key, table)
        if key in found:
            raise SwinQuantError(f"two keys of the checkpoint become {key} without {convention}'s names")
        found[key] = tensor
    return found


def _replaced(key: str, table: Iterable[tuple[str, str | Replacement]]) -> str:
    for pattern, to in table:
        key = re.sub(pattern, to, key)
    return key


def _joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict with q, k and v of each attention as one qkv. SwinQuantError for one without the others."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        match = _PART.fullmatch(key)
        if match is None:
            found[key] = tensor
            continue
        attention, kind = match.groups()
        joined = f"{attention}qkv.{kind}"
        if joined in found:
            continue
        parts = {part: state[name] for part in "qkv" if (name := f"{attention}{part}.{kind}") in state}
        if kind == "bias" and [*parts] == ["q", "v"] and f"{attention}logit_scale" in state:
            found |= {f"{attention}{part}_bias": x for part, x in parts.items()}
            continue
        forms = {(part.shape, part.dtype) for part in parts.values()}
        if len(parts) < 3 or len(forms) > 1 or not parts["q"].ndim:
            raise SwinQuantError(f"q, k and v of {joined} are not three tensors of one shape and type")
        found[joined] = torch.cat([*parts.values()])
    return found


MINDSPORE = "MindSpore"
# MindSpore's words -> ours; every spelling is read, and the first is written.
WORDS = (
    (("gamma",), "weight"),
    (("beta",), "bias"),
    (("moving_mean",), "running_mean"),
    (("moving_variance",), "running_var"),
    (("embedding_table",), "weight"),
)
PARTS = {
    "swin": (
        (("classifier", "head"), "head"),
        (("attn.relative_bias.relative_position_bias_table",), "attn.relative_position_bias_table"),
    ),
    "resnet": (
        (("classifier", "end_point", "fc"), "fc"),
        (("down_sample", "down_sample_layer", "downsample"), "downsample"),
    ),
}
_NORM = re.compile(r"(^|\.)(norm\d*|bn\d*|downsample\.1|layernorm\w*)$")  # their weight is called gamma
_DERIVED = re.compile(r"\.(relative_bias\.index|attn_mask|relative_position_index|num_batches_tracked)$")
# A gamma alone proves nothing: timm's layer scale has one, too.
_SEEN = re.compile(r"(\.(beta|moving_mean|moving_variance|embedding_table)|\.attn\.relative_bias\..+)$")


def is_mindspore(keys: Iterable[str]) -> bool:
    """Whether parameters have MindSpore's names: one word that only MindSpore uses is enough."""
    return any(_SEEN.search(key) for key in keys)


def family_in(keys: Iterable[str]) -> str:
    """`resnet` where there is a layer1, else `swin`."""
    return "resnet" if any(key.startswith("layer1.") for key in keys) else "swin"


def from_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under our names (Microsoft's for Swin, torchvision's for ResNet), without derived buffers.

    SwinQuantError where a q, k or v is missing, or two names become one.
    """
    words = (*PARTS[family_in(state)], *WORDS)
    table = [_word(theirs, ours) for all_theirs, ours in words for theirs in all_theirs]
    return _joined(renamed({key: x for key, x in state.items() if not _DERIVED.search(key)}, MINDSPORE, *table))


def to_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under mindcv's names. SwinQuantError for a qkv that cannot be split in three."""
    kind = family_in(state)
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        module, _, word = key.rpartition(".")
        if _DERIVED.search(key):
            continue
        if module.endswith(".attn.qkv"):
            if len(tensor) % 3:
                raise SwinQuantError(f"{key}: {list(tensor.shape)} is not of q, k and v")
            at = module.removesuffix("qkv")
            found |= {f"{at}{name}.{word}": part for name, part in zip("qkv", tensor.chunk(3), strict=True)}
            continue
        if _NORM.search(module):
            word = _replaced(word, (_word(ours, theirs[0]) for theirs, ours in WORDS[:4]))
        found[_replaced(f"{module}.{word}", (_word(ours, theirs[0]) for theirs, ours in PARTS[kind]))] = tensor
    return found


def _word(old: str, new: str) -> tuple[str, str]:
    """The pattern and replacement that put `new` in place of the whole words `old` of a key."""
    return rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{new}"
