"""The one quantization op: quantize to a signed integer grid and back, with a clipped straight-through gradient.

Arithmetic is that of ONNX QuantizeLinear / DequantizeLinear (x / scale, round half to even, saturate, times scale)
in float32 whatever the input type, so that what is simulated is what an engine computes. It is a custom op and
therefore opaque to `torch.compile(fullgraph=True)` and `torch.export`, which keep it as one node of the graph.
"""

import torch
from torch import Tensor

TINY_AMAX = 2.0**-24
"""A range at or below this quantizes everything to zero (pytorch-quantization's rule; quantizer_base, section 8)."""


def grid(bits: int, narrow_range: bool = False) -> tuple[int, int]:
    """Smallest and largest integer of a signed grid: 8 bits give (-128, 127), narrow range (-127, 127)."""
    qmax = 2 ** (bits - 1) - 1
    return (-qmax if narrow_range else -qmax - 1), qmax


@torch.library.custom_op("swin_quant::fake_quant", mutates_args=())
def fake_quant(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    """Round `x` to the grid `scale * {qmin..qmax}` with `scale = amax / qmax`.

    x: any shape, any float type; the result has its shape and type. amax: float32, 0-dim for one range per
    tensor, or broadcastable to `x` for one range per channel. Gradient: 1 where |x| <= amax, 0 outside
    (pytorch-quantization's clipped straight-through estimator).
    """
    scale = amax.float() / qmax
    alive = amax > TINY_AMAX
    levels = x.contiguous().float() / torch.where(alive, scale, torch.inf)
    return levels.round_().clamp_(qmin, qmax).mul_(torch.where(alive, scale, 0.0)).to(x.dtype)


@fake_quant.register_fake
def _(x: Tensor, amax: Tensor, qmin: int, qmax: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output) -> None:
    x, amax, _, _ = inputs
    ctx.save_for_backward(x, amax)


def _straight_through(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    x, amax = ctx.saved_tensors
    return gradient * (x.float().abs() <= amax).to(gradient.dtype), None, None, None


fake_quant.register_autograd(_straight_through, setup_context=_save_for_backward)
