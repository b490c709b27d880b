"""Window attention as the INT8 kernels compute it, fused and unfused (docs/reference, section 3.8)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.fastertransformer.arithmetic import int8_gemm, to_int8
from swin_quant.backends.fastertransformer.scales import Scales

NORMALIZE_EPSILON = SOFTMAX_EPSILON = 1e-6


@dataclass(frozen=True)
class AttentionWeights:
    """One block's attention. int8 weights are whole numbers in float32; `bias` [heads, L, L] and `mask` [nW, L, L], or
    None, are float32.

    `qk_scale` multiplies the logits; `logit_scale` [heads, 1, 1] is V2's, None in V1.
    """

    qkv: Tensor
    qkv_bias: Tensor
    heads: int
    bias: Tensor
    mask: Tensor | None
    qk_scale: float
    logit_scale: Tensor | None
    scales: Scales


def attention(x: Tensor, w: AttentionWeights, fused: bool) -> Tensor:
    """int8 context, at the range of the projection's input, from int8 tokens. [B * nW, L, C] -> [B * nW, L, C]."""
    s = w.scales
    sums = to_int8(int8_gemm(x, w.qkv) * s.gemm("attn.qkv"))
    real = (sums * s.step("attn.qkv._aftergemm_quantizer") + w.qkv_bias).unflatten(-1, (3, w.heads, -1))
    q, k, v = (
        to_int8(part * s.levels(f"attn.matmul_{name}_input_quantizer"))
        for name, part in zip("qkv", real.permute(2, 0, 3, 1, 4), strict=True)
    )
    if w.logit_scale is not None:
        q = _normalized(q, "q", s, w.logit_scale)
        k = _normalized(k, "k", s, 1.0)
    products = q @ k.transpose(-2, -1)  # exact: sums of 32 or 64 products
    probabilities = (_fused_softmax if fused else _unfused_softmax)(products, w)
    context = probabilities @ v  # exact: at most 1024 products, in the largest window
    context = to_int8(context * (s.fused("a v") if fused else s.gemm("a v")))
    return context.transpose(1, 2).flatten(2)


def _normalized(x: Tensor, name: str, s: Scales, factor: Tensor | float) -> Tensor:
    """V2: x / |x| * factor, int8 in and out."""
    real = x * s.step(f"attn.matmul_{name}_input_quantizer")
    norm = torch.rsqrt(real.square().sum(-1, keepdim=True) + NORMALIZE_EPSILON) * factor
    return to_int8(real * norm * s.levels(f"attn.mha_{name}_input_quantizer"))


def _fused_softmax(products: Tensor, w: AttentionWeights) -> Tensor:
    """int8 probabilities from float logits; NVIDIA has not published how the fused kernel rounds inside."""
    logits = _add(products * (w.scales.fused("q k") * w.qk_scale), w)
    return to_int8(logits.softmax(-1) * w.scales.fused("a"))


def _unfused_softmax(products: Tensor, w: AttentionWeights) -> Tensor:
    """int8 probabilities from logits that are rounded to int8."""
    logits = to_int8(products * w.scales.gemm("q k")) * w.qk_scale
    logits = _add(logits * w.scales.step("attn.softmax_input_quantizer"), w)
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    share = powers * (1 / (powers.sum(-1, keepdim=True) + SOFTMAX_EPSILON))
    return to_int8(share * w.scales.levels("attn.matmul_a_input_quantizer"))


def _add(logits: Tensor, w: AttentionWeights) -> Tensor:
    """Add position bias and mask to logits [B * nW, heads, L, L]."""
    if w.mask is None:
        return logits + w.bias
    by_window = logits.view(-1, len(w.mask), *logits.shape[1:])
    return (by_window + (w.bias + w.mask[:, None])).view_as(logits)
