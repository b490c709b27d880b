"""Arithmetic that references share: rounding to int8, half to even and saturating (`cvt.rni.sat.s8.f32`), products,
norms."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# |sum of k int8 products| <= k * 2^14, and float32 holds every whole number up to 2^24: sums of 1024 products are exact
# in any order. Longer ones are split and added in float64.
EXACT_PRODUCTS = 1024
LARGEST_E4M3 = 448.0


def rounded(x: Tensor) -> Tensor:
    """Whole numbers from -128 to 127, still float."""
    return x.round().clamp(-128, 127)


def as_type(x: Tensor, dtype: torch.dtype, levels: float | None = None) -> Tensor:
    """x, times `levels` if given, in the type of a result: rounded and saturated to int8, a NaN as 0; saturated to
    float8 (E4M3); or converted to a float type."""
    x = x if levels is None else x * levels
    if dtype == torch.int8:
        return rounded(x).nan_to_num(0.0).to(dtype)
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def product(a: Tensor, w: Tensor) -> Tensor:
    """float32 [..., N] of a [..., K] and w [N, K]: exact sums for int8, as int32 converts; float32 sums for other
    types."""
    a, w = a.float(), w.float()
    if w.shape[-1] <= EXACT_PRODUCTS:
        return F.linear(a, w)
    pieces = zip(a.split(EXACT_PRODUCTS, -1), w.split(EXACT_PRODUCTS, -1), strict=True)
    return functools.reduce(torch.add, (F.linear(x, y).double() for x, y in pieces)).float()


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """float32 LayerNorm of x [..., C] of any float type; x itself without a weight."""
    if weight is None:
        return x.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
