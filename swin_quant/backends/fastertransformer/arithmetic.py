"""The arithmetic of the INT8 kernels in plain torch: integers are whole numbers in float32 tensors, for fast GEMMs.

See docs/reference, section 3.8. All rounding is half to even (`cvt.rni.sat.s8.f32`).
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# |sum of k int8 products| <= k * 2^14, and float32 holds every whole number up to 2^24: sums of 1024 products are exact
# in any order and grouping, fused or not. Longer ones are split and added in float64.
EXACT_PRODUCTS = 1024


def as_half(value: float) -> float:
    """A scale as a float16 kernel sees it."""
    return torch.tensor(value, dtype=torch.float16).item()


def to_int8(x: Tensor) -> Tensor:
    """Round and saturate; float32 in and out, whole numbers from -128 to 127."""
    return x.round().clamp_(-128, 127)


def int8_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """The int32 sums of x [..., k] and weight [n, k], converted to float32 [..., n] as the hardware does."""
    k = weight.shape[-1]
    if k <= EXACT_PRODUCTS:
        return F.linear(x, weight)
    pieces = zip(x.split(EXACT_PRODUCTS, -1), weight.split(EXACT_PRODUCTS, -1), strict=True)
    return functools.reduce(torch.add, (F.linear(a, b).double() for a, b in pieces)).float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """float32 norm of a float16 or float32 [..., C]; weight and bias are float16, as stored."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), epsilon)


def gelu_table(step: float, bias: Tensor, levels: float) -> Tensor:
    """float32 [hidden * 256]: for each channel, GELU's int8 result for the int8 sums -128 to 127.

    The kernel works in float16, tanh form, rounding after each operation. It uses the hardware's approximate tanh
    (2^-11 relative error); this uses a correctly rounded one.
    """
    x = torch.arange(-128, 128, device=bias.device).half() * as_half(step) + bias[:, None]
    inner = as_half(0.7978845608028654) * (x + as_half(0.044715) * x * x * x)
    gelu = x * (as_half(0.5) * (as_half(1.0) + inner.tanh()))
    return to_int8((gelu * as_half(levels)).float()).flatten()


def look_up(table: Tensor, x: Tensor) -> Tensor:
    """Entry x[..., c] + 128 of channel c in a `gelu_table`. [..., hidden] -> [..., hidden]."""
    channels = 256 * torch.arange(x.shape[-1], device=x.device) + 128
    return table.index_select(0, (x + channels).int().flatten()).view_as(x)
