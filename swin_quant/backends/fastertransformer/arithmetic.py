"""The arithmetic of the INT8 kernels in plain torch: integers are whole numbers in float32 tensors, for fast GEMMs.

docs/reference, section 3.8. Rounding is half to even everywhere (`cvt.rni.sat.s8.f32`).
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# |sum of k products of int8| <= k * 2^14, and float32 holds every whole number up to 2^24: sums of 1024 products are
# exact in any order and grouping, fused or not. Longer ones are split, and added in float64.
EXACT_PRODUCTS = 1024


def as_half(value: float) -> float:
    """A scale as a kernel that works in float16 sees it."""
    return torch.tensor(value, dtype=torch.float16).item()


def to_int8(x: Tensor) -> Tensor:
    """Round and saturate; float32 in and out, whole numbers from -128 to 127."""
    return x.round().clamp_(-128, 127)


def int8_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """int32 sums of x [..., k] with weight [n, k], as float32 [..., n]: what the hardware converts them to."""
    k = weight.shape[-1]
    if k <= EXACT_PRODUCTS:
        return F.linear(x, weight)
    pieces = zip(x.split(EXACT_PRODUCTS, -1), weight.split(EXACT_PRODUCTS, -1), strict=True)
    return functools.reduce(torch.add, (F.linear(a, b).double() for a, b in pieces)).float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """float32 of a float16 or float32 [..., C]; weight and bias float16, as stored."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), epsilon)


def gelu_table(step: float, bias: Tensor, levels: float) -> Tensor:
    """float32 [hidden * 256]: for each channel, GELU's int8 result for the int8 sums -128 to 127.

    The kernel works in float16, tanh form, rounding after each operation; its tanh is the hardware's approximation
    (2^-11 relative), which a correctly rounded one stands for here. 256 results a channel are all there are.
    """
    x = torch.arange(-128, 128, device=bias.device).half() * as_half(step) + bias[:, None]
    inner = as_half(0.7978845608028654) * (x + as_half(0.044715) * x * x * x)
    gelu = x * (as_half(0.5) * (as_half(1.0) + inner.tanh()))
    return to_int8((gelu * as_half(levels)).float()).flatten()


def look_up(table: Tensor, x: Tensor) -> Tensor:
    """Row x[..., c] + 128 of channel c of a `gelu_table`. [..., hidden] -> [..., hidden]."""
    channels = 256 * torch.arange(x.shape[-1], device=x.device) + 128
    return table.index_select(0, (x + channels).int().flatten()).view_as(x)
