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
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.config.defaults import families

Entry = TypeVar("Entry")
Replacement: TypeAlias = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Publisher:
    """How a publisher names the parts of a Swin.

    Attributes:
        block: a key of every block, with places for its stage and its number there.
        embedding, norm: keys of every model; a backbone has no final norm.
        renames: pattern in a key -> its replacement under Microsoft's names; applied in this order, wherever found.
    """

    name: str
    block: str
    embedding: str
    norm: str = ""
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def first(self) -> str:
        return self.block.format(0, 0)

    def keys(self, state: Mapping[str, Any], root: str) -> list[str]:
        """The keys that a model under `root` must have: the first block of each stage, the last, embedding and norm.

        The last stage is the deepest that any key names, or that the width of the final norm tells.
        """
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
        last = self.block.format(deepest, stages.get(deepest, 0))
        return [root + key for key in dict.fromkeys(filter(None, [*blocks, last, self.embedding, self.norm]))]


_TRANSFORMERS_NAMES = (
    (r"^swin(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^embeddings\.position_embeddings$", "absolute_pos_embed"),
    (r"^encoder\.layers\.", "layers."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.((self\.)?query|q_proj)\.", ".attn.q."),
    (r"\.attention\.((self\.)?key|k_proj)\.", ".attn.k."),
    (r"\.attention\.((self\.)?value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(self|relative_position_bias)\.", ".attn."),
    (r"\.attn\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\.blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
)
MICROSOFT = Publisher("Microsoft", "layers.{}.blocks.{}.norm1.weight", "patch_embed.proj.weight", "norm.weight")
TIMM_FEATURES = Publisher(
    "timm (features_only)",
    "layers_{}.blocks.{}.norm1.weight",
    "patch_embed.proj.weight",
    renames=((r"^layers_(\d+)\.", r"layers.\1."),),
)
TRANSFORMERS, TRANSFORMERS_V2, TRANSFORMERS_BODY = (
    Publisher(
        "transformers",
        f"{prefix}encoder.layers.{{}}.blocks.{{}}.layernorm_before.weight",
        f"{prefix}embeddings.patch_embeddings.projection.weight",
        f"{prefix}layernorm.weight",
        _TRANSFORMERS_NAMES,
    )
    for prefix in ("swin.", "swinv2.", "")
)
OPENMMLAB = Publisher(
    "OpenMMLab",
    "stages.{}.blocks.{}.norm1.weight",
    "patch_embed.projection.weight",
    renames=(
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^stages\.", "layers."),
        (r"\.attn\.w_msa\.", ".attn."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    ),
)
PUBLISHERS = (MICROSOFT, TIMM_FEATURES, TRANSFORMERS, TRANSFORMERS_V2, TRANSFORMERS_BODY, OPENMMLAB)


INSERTED = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_WRAPPERS = {  # before all keys, in any order and depth
    "DistributedDataParallel": r"^module\.",
    "torch.compile": r"^_orig_mod\.",
    "Lightning": r"^model\.",
    "a wrapper's": r"^(net|network|ema|model_ema|ema_model|student|teacher)\.",
}
# Ways of naming: (name, seen, unseen, pattern, replacement). A row is in use when a key matches `seen` and none matches
# `unseen`; the replacement undoes it.
CONVENTIONS: tuple[tuple[str, str, str, str, str | Replacement], ...] = (
    ("timm features", r"^layers_0\.", r"(?!)", *TIMM_FEATURES.renames[0]),
    ("SimMIM", r"\.attn\.rpe_mlp\.", r"(?!)", r"\.attn\.rpe_mlp\.", ".attn.cpb_mlp."),
    # For a Swin alone: the heads of timm's other models have this name here, too
    ("timm", r"^head\.fc\.", r"^(?!(head|layers|patch_embed|norm|absolute_pos_embed)\b)", r"^head\.fc\.", "head."),
    (  # Microsoft ends stage i with its downsample, newer timm begins stage i + 1 with it
        "timm",
        r"^layers\.[1-9]\d*\.downsample\.",
        r"^layers\.0\.downsample\.",
        r"^layers\.(\d+)\.downsample\.",
        lambda match: f"layers.{int(match[1]) - 1}.downsample.",
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
    while state and (used := [name for name, word in _WRAPPERS.items() if all(re.match(word, key) for key in state)]):
        found += used
        state = renamed(state, used[0], (_WRAPPERS[used[0]], ""))
    for name, seen, unseen, pattern, to in CONVENTIONS:
        if any(re.search(seen, key) for key in state) and not any(re.search(unseen, key) for key in state):
            found.append(name)
            state = renamed(state, name, (pattern, to))
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
