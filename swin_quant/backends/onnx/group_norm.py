"""Group norms in operators that OpenVINO runs with channels last, as convolutions do.

The exporter's own form reshapes to [N, groups, -1], and OpenVINO would copy each map into that order and back.
"""

from typing import Any

import numpy as np


def group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """The ONNX form of `aten.group_norm`, as torch's exporter takes it. x: [N, C, ...].

    One group is a layer norm of all dimensions. Several, of a map in float32, are a factor and an offset of each
    channel, from its mean m and variance v: the mean M of a group is that of m, and its variance that of v + (m - M)^2.
    """
    import onnx_ir as ir
    from onnx.numpy_helper import from_array
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_native_group_norm

    op: Any = opset18  # its stubs know no symbolic value

    def constant(value: Any, kind: Any = np.int64) -> Any:
        return op.Constant(value=from_array(np.asarray(value, kind)))

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
