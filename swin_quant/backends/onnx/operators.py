"""Operators of an exported graph that torch lacks, and their translations to ONNX.

In torch, Q/DQ computes what ONNX defines: x / scale in float32, round half to even, saturate to int8, to uint8 around
the zero point, or to float8, times scale. The rewritten model can therefore be compared with the trained one before its
export.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swin_quant.quant.fake_quant import E4M3, FP8, round_to_grid_

GELU_OPSET = 20  # the first with Gelu
UINT16 = "uint16"  # the format of activations in 16 bits


def operator(fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Any]:
    """Make a function an operator of torch, `swin_quant::<name>`. `fake`: an empty result of its shape and type."""

    def define(compute: Callable[..., Tensor]) -> Any:
        made = torch.library.custom_op(f"swin_quant::{compute.__name__}", compute, mutates_args=())
        made.register_fake(fake)
        return made

    return define


@operator(lambda x, *_, **__: torch.empty_like(x, memory_format=torch.contiguous_format))
def qdq(x: Tensor, scale: Tensor, zero_point: int | None = None, format: str = "int8") -> Tensor:
    """Round `x`, of any shape, to `scale * {-128..127}`.

    With a uint8 zero point the levels are 0 to 255 around it, with format uint16 0 to 65535; with format fp8 they are
    `scale` times the values of float8 E4M3. scale: 0-dim, of x's type, as QuantizeLinear wants it.
    """
    least = -128 if zero_point is None else -zero_point
    ends = E4M3 if format == FP8 else (least, least + (65535 if format == UINT16 else 255))
    levels = round_to_grid_(x.float() / scale.float(), *ends)
    return levels.mul_(scale.float()).to(x.dtype).contiguous()


@operator(lambda values, scale, axis=1: torch.empty_like(values, dtype=scale.dtype))
def dequantize(values: Tensor, scale: Tensor, axis: int = 1) -> Tensor:
    """`values * scale` in the type of `scale`. values: int8 or float8; scale: 0-dim, or one value per index of `axis`.

    A scale with as many dimensions as `values` has one value per block along `axis`, all blocks equally long.
    """
    if scale.dim() > 1:
        scale = scale.repeat_interleave(values.shape[axis] // scale.shape[axis], axis)
        return (values.float() * scale.float()).to(scale.dtype)
    scales = scale.view([-1 if i == axis else 1 for i in range(values.dim())]) if scale.dim() else scale
    return (values.float() * scales.float()).to(scale.dtype)


@operator(lambda x, scale: torch.empty_like(x, dtype=torch.int8))
def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """The int8 levels of `x` [..., C], for `scale` [C]."""
    return round_to_grid_(x / scale, -128, 127).to(torch.int8)


@operator(lambda x, places: x.new_empty(x.shape[0], *places.shape, *x.shape[2:]))
def gather(x: Tensor, places: Tensor) -> Tensor:
    """`x[:, places]`: one Gather. x: [B, T, ...]; places: int32 of any shape."""
    return x[:, places]


def constant(value: Any, kind: Any = None) -> Any:
    """A constant of a translation, of numpy's type `kind`, by default that of the value."""
    from onnx.numpy_helper import from_array
    from onnxscript import opset18

    return opset18.Constant(value=from_array(np.asarray(value, kind)))


def group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """The ONNX form of `aten.group_norm`, as torch's exporter takes it. x: [N, C, ...].

    OpenVINO runs these operators with channels last, as convolutions; it would copy each map into the order of the
    exporter's own form, [N, groups, -1], and back. One group is a layer norm of all dimensions. Several, of a map in
    float32, are a factor and an offset of each channel, from its mean m and variance v: the mean M of a group is that
    of m, and its variance that of v + (m - M)^2.
    """
    import onnx_ir as ir
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_native_group_norm

    op: Any = opset18  # its stubs know no symbolic value
    if groups > 1 and (len(x.shape) != 4 or x.dtype != ir.DataType.FLOAT):
        return aten_native_group_norm(x, weight, bias, group=groups, eps=eps)[0]
    kind = x.dtype.numpy()
    weight = constant(np.ones(x.shape[1]), kind) if weight is None else weight
    bias = constant(np.zeros(x.shape[1]), kind) if bias is None else bias
    if groups == 1:
        scale, shift = (op.Unsqueeze(one, constant([*range(1, len(x.shape) - 1)])) for one in (weight, bias))
        return op.LayerNormalization(x, scale, shift, axis=1, epsilon=eps)[0]
    places, last, grouped = constant([2, 3]), constant([2]), constant([0, groups, -1])
    mean = op.ReduceMean(x, places)
    apart = op.Sub(x, mean)
    # [N, groups, C / groups], as all below
    means, variances = op.Reshape(mean, grouped), op.Reshape(op.ReduceMean(op.Mul(apart, apart), places), grouped)
    middle = op.ReduceMean(means, last)
    away = op.Sub(means, middle)
    variance = op.ReduceMean(op.Add(variances, op.Mul(away, away)), last)
    weight, bias = (op.Reshape(one, constant([1, groups, -1])) for one in (weight, bias))
    factor = op.Div(weight, op.Sqrt(op.Add(variance, constant(eps, kind))))
    offset = op.Sub(bias, op.Mul(middle, factor))
    factor, offset = (op.Reshape(one, constant([0, x.shape[1], 1, 1])) for one in (factor, offset))
    return op.Add(op.Mul(x, factor), offset)


def translations(opset: int, channels_last: bool = False) -> dict[Any, Callable[..., Any]]:
    """For `torch.onnx.export(custom_translation_table=...)`: QuantizeLinear, DequantizeLinear; GELU before opset 20;
    convolutions of volumes, whose absent bias onnxscript 0.7.2 writes as [channels, 2]. `channels_last`: group norms,
    too.

    Opset 20 has an operator for GELU, which releases of 2023 lack. ONNX Runtime and OpenVINO make one of x first times
    1 + erf(x / sqrt 2), then times a half; of the exporter's own order ONNX Runtime makes none.
    """
    import ml_dtypes
    import onnx_ir as ir
    from onnxscript import opset18

    op: Any = opset18  # its stubs know no symbolic value

    def pair(x: Any, scale: Any, zero_point: int | None = None, format: str = "int8") -> Any:
        kind = ml_dtypes.float8_e4m3fn if format == FP8 else np.int8
        unsigned = np.uint16 if format == UINT16 else np.uint8
        zero = constant(0, kind) if zero_point is None else constant(zero_point, unsigned)
        return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale, zero)

    def stored(values: Any, scale: Any, axis: int = 1) -> Any:
        if values.dtype == ir.DataType.FLOAT8E4M3FN:  # the default zero point is 0, of the type of the values
            return op.DequantizeLinear(values, scale, axis=axis) if scale.shape else op.DequantizeLinear(values, scale)
        if len(scale.shape) == 0:
            return op.DequantizeLinear(values, scale, constant(0, np.int8))
        zeros = constant(np.zeros(tuple(scale.shape), np.int8))
        return op.DequantizeLinear(values, scale, zeros, axis=axis)

    def rounded(x: Any, scale: Any) -> Any:
        zeros = constant(np.zeros(tuple(scale.shape), np.int8))
        return op.QuantizeLinear(x, scale, zeros, axis=-1)

    def gelu(x: Any, approximate: str = "none") -> Any:
        root, one, half, slope, cube = (
            ir.tensor(number, dtype=x.dtype) for number in (2**0.5, 1.0, 0.5, (2 / math.pi) ** 0.5, 0.044715)
        )
        if approximate == "tanh":
            curve = op.Tanh(op.Mul(op.Add(x, op.Mul(op.Mul(op.Mul(x, x), x), cube)), slope))
        else:
            curve = op.Erf(op.Div(x, root))
        return op.Mul(op.Mul(x, op.Add(curve, one)), half)

    def conv3d(
        x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        strides, pads, dilations = (
            [one] * 3 if isinstance(one, int) else list(one) for one in (stride, padding, dilation)
        )
        parts = (x, weight) if bias is None else (x, weight, bias)
        return op.Conv(*parts, strides=strides, pads=[*pads, *pads], dilations=dilations, group=groups)

    ops = torch.ops.swin_quant
    own: dict[Any, Callable[..., Any]] = {torch.ops.aten.gelu.default: gelu} if opset < GELU_OPSET else {}
    own |= {torch.ops.aten.group_norm.default: group_norm} if channels_last else {}
    return own | {
        ops.qdq.default: pair,
        ops.dequantize.default: stored,
        ops.quantize.default: rounded,
        ops.gather.default: lambda x, places: op.Gather(x, places, axis=1),
        torch.ops.aten.conv3d.default: conv3d,
    }
