"""Attention of V1 as one operator on int8 values (`operators/attention`), for engines that have a plugin for it."""

from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.operators import dequantize, quantize
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention
from swin_quant.base.errors import UsageError
from swin_quant.operators.attention import attention

_ROUNDED = tuple(f"matmul_{tensor}_input_quantizer" for tensor in "qkva")


class OperatorAttention(nn.Module):
    """What `QuantizedAttention` computes where q, k, v, the softmax and the input of `proj` are int8.

    Everything is rounded as there. Levels go into the operator and come out of it: nothing is read as float between.
    """

    def __init__(self, attn: QuantizedAttention) -> None:
        super().__init__()
        self.heads = attn.heads
        self.qkv: Linear = attn.qkv
        self.proj: Linear = attn.proj
        scales = [node.scale for node in _pairs(attn)]
        self.scales = [float(scale) for scale in scales]
        self.proj._input_quantizer = nn.Identity()
        for name in ("table", "index", "mask"):
            self.register_buffer(name, getattr(attn, name))
        channels = attn.proj._weight_quantizer.values.shape[0]
        self.scale: Tensor
        self.result: Tensor
        self.register_buffer("scale", torch.cat([scale.expand(channels) for scale in scales[:3]]))
        self.register_buffer("result", scales[-1])

    addend: Any = QuantizedAttention.addend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: float32 [B, nW * L, C]. `mask` is what the trained block passes; the layer has its own."""
        levels = quantize(self.qkv(x), self.scale)
        return self.proj(dequantize(attention(levels, self.addend(), self.heads, self.scales), self.result))


def as_operator(model: nn.Module) -> None:
    """Every attention of a rewritten model calls the operator. UsageError where it is not all int8, or of V2."""
    for block, parent in list(model.named_modules()):
        attn = getattr(parent, "attn", None)
        if isinstance(attn, QuantizedAttention):
            if fault := _fault(attn):
                raise UsageError(f"‹plugin› attention: {block}.attn {fault}")
            parent.attn = OperatorAttention(attn)


def _pairs(attn: QuantizedAttention) -> list[Any]:
    return [*(getattr(attn, name) for name in _ROUNDED), attn.proj._input_quantizer]


def _fault(attn: QuantizedAttention) -> str | None:
    """Why the operator cannot compute this."""
    if isinstance(attn, CosineAttention):
        return "normalises q and k, as Swin V2 does, which the operator does not: leave it out"
    pairs = [node for node in _pairs(attn) if isinstance(node, Pair)]
    if len(pairs) < len(_ROUNDED) + 1 or any(node.zero_point is not None or node.format != "int8" for node in pairs):
        return "is not all int8 without zero points: choose a ‹policy› as qdq"
    others = (attn.softmax_input_quantizer, attn.qkv._aftergemm_quantizer)
    return (
        "rounds its logits or qkv too: choose a ‹policy› as qdq" if any(isinstance(x, Pair) for x in others) else None
    )
