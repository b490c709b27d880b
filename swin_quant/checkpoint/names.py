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
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.config.defaults import families

Entry = TypeVar("Entry")
Rename: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str]]  # pattern in a key, replacement

INSERTED = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_WRAPPERS = {  # before all keys, in any order and depth
    "DistributedDataParallel": r"^module\.",
    "torch.compile": r"^_orig_mod\.",
    "Lightning": r"^model\.",
    "a wrapper's": r"^(net|network|ema|model_ema|ema_model|student|teacher)\.",
}
WRAPPER = r"(_orig_mod|module|model|net|network|_?model_ema|ema_model|ema|teacher|student)\."
MINDSPORE = "MindSpore"
# Ways of naming: (name, seen, unseen, renames in their order). A row is in use when a key matches `seen` and none
# matches `unseen`.
CONVENTIONS: tuple[tuple[str, str, str, tuple[Rename, ...]], ...] = (
    ("timm features", r"^layers_0\.", r"(?!)", ((r"^layers_(\d+)\.", r"layers.\1."),)),
    ("SimMIM", r"\.attn\.rpe_mlp\.", r"(?!)", ((r"\.attn\.rpe_mlp\.", ".attn.cpb_mlp."),)),
    # For a Swin alone: the heads of timm's other models have this name here, too
    ("timm", r"^head\.fc\.", r"^(?!(head|layers|patch_embed|norm|absolute_pos_embed)\b)", ((r"^head\.fc\.", "head."),)),
    (  # Microsoft ends stage i with its downsample, newer timm begins stage i + 1 with it
        "timm",
        r"^layers\.[1-9]\d*\.downsample\.",
        r"^layers\.0\.downsample\.",
        ((r"^layers\.(\d+)\.downsample\.", lambda match: f"layers.{int(match[1]) - 1}.downsample."),),
    ),
    (
        "transformers",
        r"^(swin(v2)?\.)?encoder\.layers\.\d+\.blocks\.\d+\.(attention|layernorm_before)\.",
        r"(?!)",
        (
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
        ),
    ),
)
_PART = re.compile(r"(.*\.attn\.)[qkv]\.(weight|bias)")

# MindSpore's words, and its parts of a Swin and of a ResNet -> ours; every spelling is read, and the first is written.
_WORDS = {
    "weight": ("gamma",),
    "bias": ("beta",),
    "running_mean": ("moving_mean",),
    "running_var": ("moving_variance",),
}
_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "swin": {
        "head": ("classifier", "head"),
        "attn.relative_position_bias_table": ("attn.relative_bias.relative_position_bias_table",),
    },
    "resnet": {
        "fc": ("classifier", "end_point", "fc"),
        "downsample": ("down_sample", "down_sample_layer", "downsample"),
    },
}
_NORM = re.compile(r"(^|\.)(norm\d*|bn\d*|downsample\.1|layernorm\w*)$")  # their weight is called gamma
_DERIVED = re.compile(r"\.(relative_bias\.index|attn_mask|relative_position_index|num_batches_tracked)$")
# A gamma alone proves nothing: timm's layer scale has one, too.
_SEEN = re.compile(r"(\.(beta|moving_mean|moving_variance|embedding_table)|\.attn\.relative_bias\..+)$")


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
        state = renamed(state, used[0], [(_WRAPPERS[used[0]], "")])
    for name, seen, unseen, renames in CONVENTIONS:
        if any(re.search(seen, key) for key in state) and not any(re.search(unseen, key) for key in state):
            found.append(name)
            state = renamed(state, name, renames)
    if "transformers" in found:
        state = _joined(state)
    if is_mindspore(state):
        found.append(MINDSPORE)
        state = from_mindspore(state)
    for family in families().values():
        if family.rename:
            state, undone = family.rename(state)
            found += undone
    return state, " + ".join(dict.fromkeys(found)) or "microsoft"


def renamed(state: Mapping[str, Tensor], convention: str, renames: Iterable[Rename]) -> dict[str, Tensor]:
    """`state` with every pattern of `renames` replaced in its keys. SwinQuantError for two keys that become one."""
    renames, found = [*renames], dict[str, Tensor]()
    for key, tensor in state.items():
        for pattern, to in renames:
            key = re.sub(pattern, to, key)
        if key in found:
            raise SwinQuantError(f"two keys of the checkpoint become {key} without {convention}'s names")
        found[key] = tensor
    return found


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


def is_mindspore(keys: Iterable[str]) -> bool:
    """Whether parameters have MindSpore's names: one word that only MindSpore uses is enough."""
    return any(_SEEN.search(key) for key in keys)


def from_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under our names (Microsoft's for Swin, torchvision's for ResNet), without derived buffers.

    SwinQuantError where a q, k or v is missing, or two names become one.
    """
    words = {**_mindspore_parts(state), **_WORDS}
    renames = [_word(theirs, ours) for ours, spellings in words.items() for theirs in spellings]
    renames.append(_word("embedding_table", "weight"))
    return _joined(renamed({key: x for key, x in state.items() if not _DERIVED.search(key)}, MINDSPORE, renames))


def to_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under mindcv's names. SwinQuantError for a qkv that cannot be split in three."""
    parts = [_word(ours, theirs) for ours, (theirs, *_) in _mindspore_parts(state).items()]
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
        if _NORM.search(module) and word in _WORDS:
            word = _WORDS[word][0]
        found |= renamed({f"{module}.{word}": tensor}, MINDSPORE, parts)
    return found


def _mindspore_parts(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    return _PARTS["resnet" if any(key.startswith("layer1.") for key in keys) else "swin"]


def _word(old: str, new: str) -> Rename:
    """The pattern and replacement that put `new` in place of the whole words `old` of a key."""
    return rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{new}"
