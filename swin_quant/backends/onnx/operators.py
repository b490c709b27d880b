"""The operators of an exported graph that torch has no name for, and what each is in ONNX.

Q/DQ computes what ONNX defines (x / scale in float32, round half to even, saturate to int8, or to uint8 around the zero
point, times scale), so that the rewritten model can be run, and compared with the trained one, before anything is
exported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("swin_quant::qdq", mutates_args=())
def qdq(x: Tensor, scale: Tensor, zero_point: int | None = None) -> Tensor:
    """Round `x` (any shape) to `scale * {-128..127}`; with a zero point, of uint8, to levels 0 to 255 around it.

    scale: 0-dim, of x's type, as QuantizeLinear wants it.
    """
    least = -128 if zero_point is None else -zero_point
    levels = (x.float() / scale.float()).round_().clamp_(least, least + 255)
    return levels.mul_(scale.float()).to(x.dtype).contiguous()


@torch.library.custom_op("swin_quant::dequantize", mutates_args=())
def dequantize(values: Tensor, scale: Tensor, axis: int = 1) -> Tensor:
    """`values * scale` in the type of `scale`. values: int8; scale: 0-dim, or one for each index along `axis`."""
    scales = scale.view([-1 if i == axis else 1 for i in range(values.dim())]) if scale.dim() else scale
    return (values.float() * scales.float()).to(scale.dtype)


@torch.library.custom_op("swin_quant::gather", mutates_args=())
def gather(x: Tensor, places: Tensor) -> Tensor:
    """`x[:, places]`: one Gather. x: [B, T, ...]; places: int32 of any shape."""
    return x[:, places]


@qdq.register_fake
def _(x: Tensor, scale: Tensor, zero_point: int | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dequantize.register_fake
def _(values: Tensor, scale: Tensor, axis: int = 1) -> Tensor:
    return torch.empty_like(values, dtype=scale.dtype)


@gather.register_fake
def _(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *places.shape, *x.shape[2:])


def translations() -> dict[Any, Callable[..., Any]]:
    """For `torch.onnx.export(custom_translation_table=...)`: QuantizeLinear and DequantizeLinear."""
    import numpy as np
    from onnx.numpy_helper import from_array
    from onnxscript import opset18

    op: Any = opset18  # its stubs know no symbolic value

    def pair(x: Any, scale: Any, zero_point: int | None = None) -> Any:
        held = np.int8(0) if zero_point is None else np.uint8(zero_point)
        zero = op.Constant(value=from_array(np.asarray(held)))
        return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale, zero)

    def stored(values: Any, scale: Any, axis: int = 1) -> Any:
        if len(scale.shape) == 0:
            return op.DequantizeLinear(values, scale, op.Constant(value=from_array(np.zeros((), np.int8))))
        zeros = op.Constant(value=from_array(np.zeros(tuple(scale.shape), np.int8)))
        return op.DequantizeLinear(values, scale, zeros, axis=axis)

    def taken(x: Any, places: Any) -> Any:
        return op.Gather(x, places, axis=1)

    ops = torch.ops.swin_quant
    return {ops.qdq.default: pair, ops.dequantize.default: stored, ops.gather.default: taken}
