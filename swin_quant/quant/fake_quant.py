"""The one quantization op: quantize to an integer grid and back.

The arithmetic is that of ONNX QuantizeLinear / DequantizeLinear (x / scale, round half to even, saturate, times scale)
in float32 for any input type, so that the simulation computes what an engine does. A grid of signed levels from `qmin`
to `qmax` is also a grid of unsigned levels with the zero point `-qmin`. The ends -448 and 448 stand for float8 E4M3: no
integer grid has them. As a custom op it is one node in any graph; `straight_through` has its gradient.
"""

import torch
from torch import Tensor

# A range at or below this quantizes everything to zero (pytorch-quantization's rule; docs/reference, section 9.1).
TINY_AMAX = 2.0**-24
UNUSED_AMAX = 1.0  # for tensors of zeros: any range is right, and formats need a positive one

FP8 = "fp8"
FORMATS = ("int8", FP8)  # levels are whole numbers, or the finite values of float8 E4M3 (the `fn` kind)
E4M3 = (-448, 448)
# mask of float32's exponent, smallest normal E4M3, steps of an octave
_E4M3_EXPONENT, _E4M3_SMALLEST_NORMAL, _E4M3_STEPS = 0x7F800000, 2.0**-6, 8


def grid(bits: int, narrow_range: bool = False, format: str = "int8") -> tuple[int, int]:
    """Smallest and largest level of a signed grid: 8 bits give (-128, 127), narrow range (-127, 127), fp8 E4M3."""
    if format == FP8:
        return E4M3
    qmax = 2 ** (bits - 1) - 1
    return (-qmax if narrow_range else -qmax - 1), qmax


def grid_between(low: float, high: float, levels: int) -> tuple[int, int]:
    """Smallest and largest integer of the grid of `levels` steps that best fits low <= 0 <= high, low < high.

    The zero point is -qmin, from 0 to levels - 1: the grid has 0 and a level above it.
    """
    zero_point = min(round(-low * levels / (high - low)), levels - 1)
    return -zero_point, levels - zero_point


def is_symmetric(qmin: int, qmax: int) -> bool:
    """Whether a grid is as long below zero as above, or one level longer."""
    return -qmin - qmax in (0, 1)


def lowest_inside(amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """The smallest value that is not clipped; `amax` is the largest.

    On a signed grid it is -amax, as in pytorch-quantization, though the grid has a level below; otherwise it is the
    grid's end.
    """
    return -amax if is_symmetric(qmin, qmax) else amax * (qmin / qmax)


def spacing(levels: Tensor, qmin: int, qmax: int) -> Tensor:
    """The distance of the grid's levels around each of `levels`, which may lie between two; 0-dim if all are equal.

    For E4M3 it is an eighth of the power of two below a value, or near zero of the smallest normal value.
    """
    if (qmin, qmax) != E4M3:
        return torch.ones((), dtype=levels.dtype, device=levels.device)
    power = (levels.float().view(torch.int32) & _E4M3_EXPONENT).view(torch.float32)
    return power.clamp_(min=_E4M3_SMALLEST_NORMAL).div_(_E4M3_STEPS).to(levels.dtype)


def round_to_grid_(levels: Tensor, qmin: int, qmax: int) -> Tensor:
    """Round x / scale to the grid's levels in place, half to even, and saturate."""
    if (qmin, qmax) != E4M3:
        return levels.round_().clamp_(qmin, qmax)
    steps = spacing(levels.clamp_(qmin, qmax), qmin, qmax)  # powers of two: dividing and multiplying by them is exact
    return levels.div_(steps).round_().mul_(steps)


def to_levels(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    """The levels of `x` on the grid of `fake_quant` and their scale, float32 in the shapes of x and amax.

    Both are 0 for ranges at or below `TINY_AMAX`.
    """
    alive = amax > TINY_AMAX
    scale = torch.where(alive, amax.float() / qmax, torch.inf)
    # in place: moving a large tensor costs more than computing it
    levels = round_to_grid_(x.float() / scale, qmin, qmax)
    return levels, torch.where(alive, scale, 0.0)


@torch.library.custom_op("swin_quant::fake_quant", mutates_args=())
def fake_quant(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """Round `x` to the grid `scale * {qmin..qmax}` with `scale = amax / qmax`, qmin <= 0 < qmax, or to E4M3.

    x: any shape, any float type; the result has its shape and type. amax: float32, 0-dim for one range per tensor, or
    broadcastable to `x` for one range per channel.
    """
    return quantize_dequantize(x, amax, qmin, qmax)


def quantize_dequantize(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """The op's arithmetic in torch operations; the result is contiguous."""
    levels, scale = to_levels(x, amax, qmin, qmax)
    return levels.mul_(scale).to(x.dtype).contiguous()


@fake_quant.register_fake
def _(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
