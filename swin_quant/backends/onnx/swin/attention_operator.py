"""Window attention as one operator on int8 values, for engines with a plugin for it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.operators import dequantize, quantize
from swin_quant.backends.onnx.swin.attention import AsHeads, CosineAttention, QuantizedAttention, norm
from swin_quant.base.errors import UsageError

_ROUNDED = tuple(f"matmul_{tensor}_input_quantizer" for tensor in "qkva")
FAST_DEPTH, FAST_TOKENS = 32, 64  # channels of a head and tokens of a window (plugins/openvino/attention_vnni.hpp)
_ROUNDED_V2 = tuple(f"mha_{tensor}_input_quantizer" for tensor in "qk") + _ROUNDED[2:]


def attention(levels: Tensor, constant: Tensor, heads: int, scales: Sequence[float]) -> Any:
    """The operator in torch: softmax(q k^T + constant) v in each window, int8 [B, T, C].

    levels: int8 [B, T, 3C], q, k and v side by side, tokens window by window. constant: float32 [nW * heads, L, L];
    window i adds that of i modulo nW. scales: of q, k, v, of the softmax if it is rounded to int8, and of the result.
    """
    if has_torch_function((levels, constant)):
        return handle_torch_function(attention, (levels, constant), levels, constant, heads, scales)
    of_q, of_k, of_v, *of_softmax, of_result = scales
    batch, tokens, channels = levels.shape
    windows, length, depth = constant.shape[0] // heads, constant.shape[-1], channels // (3 * heads)
    x = levels.float().view(-1, windows, length, 3, heads, depth).permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
    logits = (x[0] * of_q) @ (x[1] * of_k).transpose(-2, -1) + constant
    shares = logits.softmax(dim=-1)
    for scale in of_softmax:
        shares = _rounded(shares, scale) * scale
    x = (shares @ (x[2] * of_v)).view(-1, windows, heads, length, depth).transpose(2, 3)
    return _rounded(x.reshape(batch, tokens, heads * depth), of_result).to(torch.int8)


def _rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).round().clamp(-128, 127)


class OperatorAttention(nn.Module):
    """`QuantizedAttention` as one operator, for q, k, v and an input of `proj` in int8; the softmax may be int8.

    It rounds as `QuantizedAttention` does. Int8 levels go into the operator and come out of it. V2 normalises q and k
    before the operator, in the linear's output.
    """

    operator = "attention"

    def __init__(self, attn: QuantizedAttention) -> None:
        super().__init__()
        self.heads = attn.heads
        self.qkv: Linear = attn.qkv
        self.proj: Linear = attn.proj
        scales = [node.scale for node in _nodes(attn) if isinstance(node, Pair)]
        self.scales = scales_of(attn)
        self.proj._input_quantizer = nn.Identity()
        for name in ("table", "index", "mask"):
            self.register_buffer(name, getattr(attn, name))
        of_q = attn.head_scale[: self.heads].view(-1, 1) if isinstance(attn, CosineAttention) else None
        ones = torch.ones(self.heads, 1)
        self.gain: Tensor | None
        self.register_buffer("gain", None if of_q is None else torch.cat([of_q, ones, ones]))
        self.register_buffer("of_values", torch.arange(3 * self.heads)[:, None] >= 2 * self.heads)
        channels = attn.proj._weight_quantizer.values.shape[0]
        self.of_values: Tensor
        self.scale: Tensor
        self.result: Tensor
        self.register_buffer("scale", torch.cat([scale.expand(channels) for scale in scales[:3]]))
        self.register_buffer("result", scales[-1])

    layout = AsHeads()
    addend: Any = QuantizedAttention.addend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: float32 [B, nW * L, C]. `mask`: the trained block passes it; the layer holds its own."""
        qkv = self.qkv(x)
        levels = quantize(qkv if self.gain is None else self.normalised(qkv, self.gain), self.scale)
        return self.proj(dequantize(attention(levels, self.addend(), self.heads, self.scales), self.result))

    def normalised(self, qkv: Tensor, gain: Tensor) -> Tensor:
        """qkv [B, T, 3C] with the q and k of each head scaled to the length `gain` [3 heads, 1]; v stays."""
        x = qkv.unflatten(-1, (3 * self.heads, -1))
        return (x * torch.where(self.of_values, 1.0, gain / norm(x))).flatten(2)


def as_operator(model: nn.Module, is_compiled: Callable[[], bool] | None = None) -> None:
    """Let every attention of a rewritten model call the operator, in place. UsageError for one that is not all int8.

    With `is_compiled`, asked where it matters, only those with which the compiled operator is fast call it.
    """
    found = {
        f"{name}.attn": parent
        for name, parent in model.named_modules()
        if isinstance(getattr(parent, "attn", None), QuantizedAttention)
    }
    faults = {name: fault_of(parent.attn) for name, parent in found.items()}
    if is_compiled:
        found = {name: one for name, one in found.items() if not faults[name] and is_fast(one.attn)}
        found = found if found and is_compiled() else {}
    elif fault := next(((name, why) for name, why in faults.items() if why), None):
        raise UsageError(f"‹plugin› attention: {' '.join(fault)}")
    for parent in found.values():
        parent.attn = OperatorAttention(parent.attn)


def scales_of(attn: QuantizedAttention) -> list[float]:
    """The scales of q, k, v, of the softmax if it is rounded, and of the result."""
    return [float(node.scale) for node in _nodes(attn) if isinstance(node, Pair)]


def is_fast(attn: Any) -> bool:
    """Whether the compiled operator has fast loops for heads and windows of these sizes."""
    channels = attn.proj._weight_quantizer.values.shape[0]
    return channels == FAST_DEPTH * attn.heads and attn.length <= FAST_TOKENS


def _nodes(attn: QuantizedAttention) -> list[Any]:
    names = _ROUNDED_V2 if isinstance(attn, CosineAttention) else _ROUNDED
    return [*(getattr(attn, name) for name in names), attn.proj._input_quantizer]


def fault_of(attn: QuantizedAttention) -> str | None:
    """The reason why the operator cannot compute `attn`; None if it can."""
    *of_qkv, of_softmax, of_result = _nodes(attn)
    pairs = [*of_qkv, of_result, *([of_softmax] if isinstance(of_softmax, Pair) else [])]
    if any(not isinstance(x, Pair) or x.zero_point is not None or x.offset or x.format != "int8" for x in pairs):
        return "is not all int8 without zero points: choose a ‹policy› as qdq or cuda"
    others = [attn.softmax_input_quantizer, attn.qkv._aftergemm_quantizer]
    if isinstance(attn, CosineAttention):
        others += [getattr(attn, name) for name in _ROUNDED[:2]]
    if any(isinstance(x, Pair) for x in others):
        return "rounds its logits or qkv too: choose a ‹policy› as qdq or cuda"
    if getattr(attn, "scale", None) is not None or (attn.index is None and attn.table.dim() > 3):
        return "has its scale outside of its weights, or windows apart: export it without ‹rewrites› of your own"
    return None
