"""An int8 linear as operators of blocks take it: five constants, what they compute, and which linears have them."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.onnx.layers import Linear, Pair, StoredWeight

CONSTANTS = 5


def int8_linear(y: Tensor, scale: Tensor, zero: Tensor, weight: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """y [..., in], rounded to levels of `scale` around `zero`, times W [in, out] of `scales` [out], plus bias [out]."""
    ends = torch.iinfo(zero.dtype)
    levels = ((y / scale).round() + zero).clamp(ends.min, ends.max) - zero
    return levels * scale @ (weight * scales) + bias


def complete(linear: Linear) -> None:
    """Give a linear all its constants, in place: a zero point, a scale for each column, a bias."""
    node: Any = linear._input_quantizer
    weight: Any = linear._weight_quantizer
    kind = torch.int8 if node.zero_point is None else torch.uint8
    node.register_buffer("zero", torch.tensor(node.zero_point or 0, dtype=kind))
    weight.scale = weight.scale.expand(weight.values.shape[1]).contiguous()
    if linear.bias is None:
        linear.bias = torch.zeros_like(weight.scale)


def constants_of(linear: Linear) -> list[Tensor]:
    """The constants of a complete linear, as `int8_linear` takes them."""
    node: Any = linear._input_quantizer
    weight: Any = linear._weight_quantizer
    return [node.scale, node.zero, weight.values, weight.scale, linear.bias]


def fault_of(linear: Linear) -> str | None:
    """The reason why a linear cannot have these constants; None if it can."""
    node, weight = linear._input_quantizer, linear._weight_quantizer
    if isinstance(linear._aftergemm_quantizer, Pair):
        return "rounds more than what its linears take: choose a ‹policy› as qdq or cuda"
    is_eight = isinstance(node, Pair) and node.format == "int8" and not node.offset
    if not is_eight or not isinstance(weight, StoredWeight) or weight.values.dtype != torch.int8:
        return "is not all int8: choose a ‹policy› as qdq or cuda"
    if weight.scale.dim() > 1:
        return "has weights in blocks: choose a ‹policy› as qdq or cuda"
    return None
