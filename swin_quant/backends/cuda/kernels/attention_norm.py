"""Window attention with all that follows it in its branch: projection, residual and norm, in one kernel."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels import attention, gemm_norm
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles, attention_norm_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows


def reference(
    qkv: Tensor,
    windows: Windows,
    heads: int,
    logits_scale: Tensor | float,
    position_bias: Tensor,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    softmax_levels: float | None = None,
    context_scale: float = 1.0,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
    post: bool = False,
) -> None:
    """qkv [M, 3 * heads * d] -> out half [B, R, R, N]: `attention`, whose context is of w's type, then `gemm_norm`."""
    context = torch.empty(len(qkv), w.shape[1], dtype=w.dtype, device=qkv.device)
    attention.reference(
        qkv, context, windows, heads, logits_scale, position_bias, softmax_levels, context_scale
    )  # fmt: skip
    gemm_norm.reference(
        context, w, scale, bias, windows, residual, out, norm_weight, norm_bias, eps, levels, out_quantized, post
    )


def call(
    qkv: Tensor,
    windows: Windows,
    heads: int,
    logits_scale: Tensor | float,
    position_bias: Tensor,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    softmax_levels: float | None = None,
    context_scale: float = 1.0,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
    post: bool = False,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments. N must be a multiple of 32."""
    from swin_quant.backends.cuda.kernels.jit import attention as jit

    m, (n, k), length = qkv.shape[0], w.shape, windows.tokens
    t = (tiles or attention_norm_tiles(length, n)).holding(columns=least_step(qkv.element_size())).dividing(inner=n)
    arguments = {
        "qkv": qkv,
        "w": w,
        "scale": scale,
        "bias": bias,
        "residual": residual,
        "out": out,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "out_quantized": out_quantized,
        "logits_scale": logits_scale,
        "position_bias": position_bias,
        "softmax_levels": softmax_levels,
        "context_scale": context_scale,
        "rows_in_all": m,
        "eps": eps,
        "levels": levels,
    }
    constants = {
        "N": n,
        "POST": post,
        **windows.constants(),
        "HEADS": heads,
        "D": k // heads,
        "BIAS_ROW": position_bias.stride(1),
        "ONE_SCALE": isinstance(logits_scale, float),
        "BQ": t.rows,
        "BKEYS": t.columns,
        "BN": t.inner,
    }
    grid = (m // length, -(-length // t.rows))
    return PreparedLaunch(jit.attention_norm, grid, arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
