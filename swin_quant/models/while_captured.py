"""What modules do in place of their own forward pass while they are captured."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE = re.compile("drop|stochasticdepth", re.IGNORECASE)  # classes that act only in training


@contextmanager
def noise_kept(module: nn.Module) -> Iterator[None]:
    """Inside the context, a module that acts only in training leaves a dropout behind, which drops nothing."""
    changed = [
        part
        for part in module.modules()
        if NOISE.search(type(part).__name__) and not is_torchs(part) and not list(part.children())
    ]

    def nothing(x: Any, *others: Any, **options: Any) -> Any:
        return torch.ops.aten.dropout.default(x, 0.0, False) if isinstance(x, Tensor) else x

    for part in changed:
        part.forward = nothing
    try:
        yield
    finally:
        for part in changed:
            del part.forward


@contextmanager
def attention_opened(module: nn.Module) -> Iterator[None]:
    """Inside the context, torch's attention modules compute their products by plain operations, not by a fused one, and
    add a mask without a look at its values, which are not known: whether it is causal is a hint for the fused one."""
    fast, transformer = torch.backends.mha.get_fastpath_enabled(), nn.modules.transformer
    plain = [part for part in module.modules() if type(part) is nn.MultiheadAttention and part.batch_first]
    for part in plain:
        part.forward = partial(_self_attention, part)  # type: ignore[method-assign]
    looks = transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        for part in plain:
            del part.forward
        transformer._detect_is_causal_mask = looks
        torch.backends.mha.set_fastpath_enabled(fast)


def _self_attention(part: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """The forward pass of torch's attention: that of a sequence with itself on [B, T, C], where torch reshapes to
    [T, B, C] and heads to a batch."""
    weight, extra = part.in_proj_weight, (part.bias_k, part.add_zero_attn or None)
    is_plain = query is key and key is value and weight is not None and query.dim() == 3 and extra == (None, None)
    masked = any(options.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    if not is_plain or masked or options.get("is_causal") or options.get("need_weights", True):
        return nn.MultiheadAttention.forward(part, query, key, value, **options)
    heads = (3, part.num_heads, part.head_dim)
    q, k, v = F.linear(query, weight, part.in_proj_bias).unflatten(-1, heads).permute(2, 0, 3, 1, 4).unbind()
    found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(found, part.out_proj.weight, part.out_proj.bias), None


def is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not type(module).__module__.startswith("torch.nn.utils")
