"""Integer arithmetic that the FasterTransformer emulator and the CUDA kernels' references share.

Whole numbers in float32 tensors stand for integers, for fast products. Rounding is half to even and saturates
(`cvt.rni.sat.s8.f32`).
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# |sum of k int8 products| <= k * 2^14, and float32 holds every whole number up to 2^24: sums of 1024 products are exact
# in any order and grouping. Longer ones are split and added in float64.
EXACT_PRODUCTS = 1024


def rounded(x: Tensor) -> Tensor:
    """Whole numbers from -128 to 127, still float."""
    return x.round().clamp(-128, 127)


def as_half(value: float) -> float:
    """A number as a float16 kernel sees it."""
    return torch.tensor(value, dtype=torch.float16).item()


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


def gelu_table(step: float, bias: Tensor, levels: float) -> Tensor:
    """int8 [N, 256]: FasterTransformer's GELU for the int8 sums -128 to 127 of each channel; bias half [N].

    The kernel works in float16, tanh form, rounding after each operation (docs/reference/weights.md, section 3.8). It
    uses the hardware's approximate tanh (2^-11 relative error); this uses a correctly rounded one.
    """
    x = torch.arange(-128, 128, device=bias.device).half() * as_half(step) + bias.half()[:, None]
    inner = as_half(0.7978845608028654) * (x + as_half(0.044715) * x * x * x)
    gelu = x * (as_half(0.5) * (1.0 + inner.tanh()))
    return rounded((gelu * as_half(levels)).float()).nan_to_num(0.0).to(torch.int8)
