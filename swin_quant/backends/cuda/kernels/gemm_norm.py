"""The projection with its residual and the norm behind it; in V2 with the norm in front of the residual."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels import gemm, norm_quantize, norm_residual
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue
from swin_quant.backends.cuda.kernels.tiles import Tiles, gemm_norm_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map


def reference(
    a: Tensor,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    windows: Windows,
    residual: Tensor | None,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
    post: bool = False,
) -> None:
    """a [M, K] in window order, w [N, K] -> out half [B, R, R, N], its rows those of the map; residual may be out.

    V1: out = a w^T + residual, `out_quantized` [M, N] the norm of that times `levels` for fc1: `gemm`, then
    `norm_quantize`. With `post` (V2) out = norm(a w^T) + residual, `out_quantized` that times `levels`: `gemm`, then
    `norm_residual`; without a residual its merging.
    """
    if post:
        branch = torch.empty(len(a), len(w), dtype=out.dtype, device=a.device)
        gemm.reference(a, w, scale, bias, Epilogue("half"), branch)
        norm_residual.reference(branch, norm_weight, norm_bias, eps, residual, windows, out, levels, out_quantized)
    else:
        assert out_quantized is not None
        gemm.reference(a, w, scale, bias, Epilogue("residual"), out, windows=windows, residual=residual)
        norm_quantize.reference(out, norm_weight, norm_bias, eps, levels, whole_map(out.shape[1]), out_quantized)


def call(
    a: Tensor,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    windows: Windows,
    residual: Tensor | None,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
    post: bool = False,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments. N and K must be multiples of 32."""
    from swin_quant.backends.cuda.kernels.jit import gemm_norm

    (m, k), n = a.shape, w.shape[0]
    size = a.element_size()
    t = (tiles or gemm_norm_tiles(m, n, k, size)).holding(inner=least_step(size)).dividing(columns=n, inner=k)
    arguments = {
        "a": a,
        "w": w,
        "scale": scale,
        "bias": bias,
        "residual": residual,
        "out": out,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "out_quantized": out_quantized,
        "rows_in_all": m,
        "eps": eps,
        "levels": levels,
    }
    constants = {"N": n, "K": k, "POST": post, **windows.constants(), "BM": t.rows, "BN": t.columns, "BK": t.inner}
    return PreparedLaunch(gemm_norm.gemm_norm, (-(-m // t.rows),), arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
