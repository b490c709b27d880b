"""Rename parameters to Microsoft's names (docs/reference, section 1.2), the one convention inside this package.

timm's patch merging concatenates the four neighbours in Microsoft's order, (0,0), (1,0), (0,1), (1,1), and its V2
keeps `q_bias` and `v_bias` apart as Microsoft does: only names change, no tensor. transformers names the parts of a
block as BERT's; its newer V1 modules have other names in memory, and both are read. Its q, k and v are three linears,
and one here, with rows in that order; V2's k has no bias in either.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import mindspore
from swin_quant.config.families import families

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


_INSERTED = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
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
    Convention("timm features", r"^layers_0\.", r"^layers_(\d+)\.", lambda match: f"layers.{match[1]}."),
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
_TRANSFORMERS = (  # pattern in a key -> its replacement; applied in this order, each wherever it is found
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
_QUERY = re.compile(r"(.*\.attn\.)q\.(weight|bias)")


def without_inserted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the names that torch puts into keys where it wraps a part of a model."""
    names = [_INSERTED.sub("", key) for key in state]
    return dict(zip(names, state.values(), strict=True)) if len({*names}) == len(names) else state


def to_microsoft(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """`state` under Microsoft's names, and the names of the conventions that were undone ("microsoft" if none).

    A key that no convention knows is left alone. Two keys that would become one are an error.
    """
    found: list[str] = []
    while used := [wrapper for wrapper in WRAPPERS if wrapper.used_by(state)]:
        found += [wrapper.name for wrapper in used]
        state = _renamed(state, used[0].name, (used[0].pattern, used[0].to))
    for convention in CONVENTIONS:
        if convention.used_by(state):
            found.append(convention.name)
            state = _renamed(state, convention.name, (convention.pattern, convention.to))
    if any(map(_TRANSFORMERS_SEEN.match, state)):
        found.append("transformers")
        state = _from_transformers(state)
    if mindspore.is_mindspore(state):
        found.append(mindspore.NAME)
        state = mindspore.from_mindspore(state)
    for family in families().values():
        if family.rename:
            state, undone = family.rename(state)
            found += undone
    return state, " + ".join(dict.fromkeys(found)) or "microsoft"


def _renamed(state: dict[str, Tensor], convention: str, *table: tuple[str, str | Replacement]) -> dict[str, Tensor]:
    """`state` with every pattern of `table` replaced in its keys."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        for pattern, to in table:
            key = re.sub(pattern, to, key)
        if key in renamed:
            raise SwinQuantError(f"two keys of the checkpoint become {key} without {convention}'s names")
        renamed[key] = tensor
    return renamed


def _from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict under Microsoft's names, with q, k and v joined. SwinQuantError for a q without its k and v."""
    renamed = _renamed(state, "transformers", *_TRANSFORMERS)
    for query in [match for match in map(_QUERY.fullmatch, renamed) if match]:
        _join(renamed, *query.groups())
    return renamed


def _join(state: dict[str, Tensor], attention: str, kind: str) -> None:
    """Put q, k and v of one attention together, its weights or its biases."""
    parts = {part: state.pop(f"{attention}{part}.{kind}") for part in "qkv" if f"{attention}{part}.{kind}" in state}
    if kind == "bias" and [*parts] == ["q", "v"] and f"{attention}logit_scale" in state:
        state[f"{attention}q_bias"], state[f"{attention}v_bias"] = parts["q"], parts["v"]
        return
    forms = {(part.shape, part.dtype) for part in parts.values()}
    if len(parts) < 3 or len(forms) > 1 or not parts["q"].ndim:
        raise SwinQuantError(f"q, k and v of {attention}qkv.{kind} are not three tensors of one shape and type")
    state[f"{attention}qkv.{kind}"] = torch.cat([*parts.values()])
