"""Window attention in one kernel: logits, position bias, shift mask, softmax, and the sum over values."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.rounding import as_type, rounded
from swin_quant.backends.cuda.kernels.tiles import Tiles, attention_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows

MASKED = -100.0  # added to the logit of two tokens that only the cyclic shift brought together
_VECTOR = 8  # halves that a load takes at once


def bias_row(tokens: int) -> int:
    """How many values a row of the position bias has in memory, of a window of so many tokens: whole vectors."""
    return -(-tokens // _VECTOR) * _VECTOR


def reference(
    qkv: Tensor,
    out: Tensor,
    windows: Windows,
    heads: int,
    logits_scale: Tensor | float,
    position_bias: Tensor,
    softmax_levels: float | None = None,
    context_scale: float = 1.0,
    product_levels: float | None = None,
    product_step: float = 1.0,
    softmax_epsilon: float = 0.0,
) -> None:
    """qkv [M, 3 * heads * d] in window order, columns (q | k | v, head, d) -> out [M, heads * d].

    logits = q k^T * logits_scale (float32 [heads], or one for all) + (position_bias [heads, L, L or more] + MASKED
    between regions); what fills up its rows is not used. qkv int8 or float8: with `softmax_levels` probabilities are of
    its type, softmax * softmax_levels; without, exp(logits - largest) in float16, whose products with v are divided by
    their sum. qkv half: the latter, in its type. out = context * context_scale, int8, float8 or half. V2's q and k come
    normalised, by the epilogue "unit".
    d: a power of two, 32 or more (narrower heads are padded by zeros).

    FasterTransformer's unfused kernels: with `product_levels` logits = int8(q k^T * product_levels) * logits_scale *
    product_step, and the sum of exp has softmax_epsilon added.
    """
    length = windows.tokens
    q, k, v = qkv.float().view(-1, length, 3, heads, qkv.shape[1] // (3 * heads)).permute(2, 0, 3, 1, 4)
    logits = q @ k.transpose(-2, -1)  # of int8: exact
    if product_levels is not None:
        logits = rounded(logits * product_levels)
    logits = logits * (logits_scale[:, None, None] if isinstance(logits_scale, Tensor) else logits_scale)
    if product_levels is not None:
        logits = logits * product_step
    added = position_bias[..., :length].float()
    if windows.shift:
        rows = torch.arange(windows.count * length, device=qkv.device)
        region = windows.region_of(rows).view(windows.count, 1, length)
        mask = torch.where(region.unsqueeze(3) == region.unsqueeze(2), 0.0, MASKED)
        added = added + mask
        logits = (logits.unflatten(0, (-1, windows.count)) + added).flatten(0, 1)
    else:
        logits = logits + added
    if softmax_levels is not None:
        shares = as_type(_softmax(logits, softmax_epsilon) * softmax_levels, qkv.dtype).float()
        context = shares @ v  # of int8 exact: at most 1024 products
    else:
        powers = (logits - logits.amax(-1, keepdim=True)).exp()
        operand = powers.to(torch.float16 if qkv.dtype.itemsize == 1 else qkv.dtype).float()
        context = operand @ v / powers.sum(-1, keepdim=True)
    out.copy_(as_type((context * context_scale).transpose(1, 2).flatten(2).flatten(0, 1), out.dtype))


def _softmax(logits: Tensor, epsilon: float) -> Tensor:
    if not epsilon:
        return logits.softmax(-1)
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    return powers * (1 / (powers.sum(-1, keepdim=True) + epsilon))


def call(
    qkv: Tensor,
    out: Tensor,
    windows: Windows,
    heads: int,
    logits_scale: Tensor | float,
    position_bias: Tensor,
    softmax_levels: float | None = None,
    context_scale: float = 1.0,
    product_levels: float | None = None,
    product_step: float = 1.0,
    softmax_epsilon: float = 0.0,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments. Of a position_bias with rows of `bias_row` vectors are loaded."""
    from swin_quant.backends.cuda.kernels.jit import attention

    m, width = out.shape
    length, head_dim = windows.tokens, width // heads
    t = (tiles or attention_tiles(length, head_dim)).holding(columns=least_step(qkv.element_size()))
    arguments = {
        "qkv": qkv,
        "out": out,
        "logits_scale": logits_scale,
        "position_bias": position_bias,
        "softmax_levels": softmax_levels,
        "context_scale": context_scale,
        "product_levels": product_levels,
        "product_step": product_step,
        "softmax_epsilon": softmax_epsilon,
        "windows_in_all": m // length if t.windows > 1 else None,
    }
    constants = {
        **windows.constants(),
        "HEADS": heads,
        "D": head_dim,
        "BIAS_ROW": position_bias.stride(1),
        "ONE_SCALE": isinstance(logits_scale, float),
        "BQ": t.rows,
        "BKEYS": t.columns,
        "WINDOWS": t.windows,
    }
    grid = (-(-(m // length) // t.windows) * heads, -(-length // t.rows))
    options = t.options() | ({"enable_fp_fusion": False} if product_levels is not None else {})
    return PreparedLaunch(attention.attention, grid, arguments, constants, options)


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
