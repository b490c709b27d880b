"""Swin and Swinv2 as Hugging Face's transformers names them, renamed to Microsoft's.

Its files name a block's parts as BERT's were; its newer V1 modules are named otherwise in memory, and both are read.
q, k and v are three linears there and one here, with rows in that order; V2's k has no bias in either.
"""

import re

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError

NAME = "transformers"
_SEEN = re.compile(r"(swin(v2)?\.)?encoder\.layers\.\d+\.blocks\.\d+\.(attention|layernorm_before)\.")
_TABLE = (  # what a key holds or begins with (^) -> what stands there instead; in this order, each where it is found
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


def uses_transformers_names(state: dict[str, Tensor]) -> bool:
    """Whether some key is named as in transformers."""
    return any(map(_SEEN.match, state))


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict under Microsoft's names, q, k and v joined. SwinQuantError for two keys that become one, and for
    a q without its k and v."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        new = _renamed(key)
        if new in renamed:
            raise SwinQuantError(f"two keys of the checkpoint become {new} without {NAME}'s names")
        renamed[new] = tensor
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


def _renamed(key: str) -> str:
    for pattern, new in _TABLE:
        key = re.sub(pattern, new, key)
    return key
