"""fc1, GELU, fc2 and the residual, in V2 with its norm: the hidden channels never leave the chip."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels import gemm, norm_residual
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue
from swin_quant.backends.cuda.kernels.tiles import Tiles, least_step, mlp_tiles
from swin_quant.backends.cuda.kernels.windows import whole_map


def reference(
    a: Tensor,
    w1: Tensor,
    scale1: Tensor | None,
    bias1: Tensor,
    hidden_levels: float | None,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    out: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """a [M, C], w1 [H, C], w [C, H] -> out half [B, R, R, C] = fc2(GELU(fc1(a))) + residual, which may be out.

    Rows are those of the map. All operands int8, with `hidden_levels`, or all half, without. With a norm (V2) it is of
    fc2's results, before the residual is added.
    """
    rows, flat = len(a), whole_map(out.shape[1])
    hidden = torch.empty(rows, len(w1), dtype=a.dtype, device=a.device)
    gemm.reference(a, w1, scale1, bias1, Epilogue("gelu"), hidden, levels=hidden_levels)
    if norm_weight is None or norm_bias is None:
        gemm.reference(hidden, w, scale, bias, Epilogue("residual"), out, windows=flat, residual=residual)
    else:
        branch = torch.empty(rows, len(w), dtype=out.dtype, device=a.device)
        gemm.reference(hidden, w, scale, bias, Epilogue("half"), branch)
        norm_residual.reference(branch, norm_weight, norm_bias, eps, residual, flat, out)


def call(
    a: Tensor,
    w1: Tensor,
    scale1: Tensor | None,
    bias1: Tensor,
    hidden_levels: float | None,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    out: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments. C and H must be multiples of 32."""
    from swin_quant.backends.cuda.kernels.jit import mlp

    (m, c), hidden = a.shape, w1.shape[0]
    least = least_step(a.element_size())
    t = (tiles or mlp_tiles(m, c, hidden, a.dtype, norm_weight is not None)).holding(columns=least, inner=least)
    t = t.dividing(columns=c, inner=hidden)
    arguments = {
        "a": a,
        "w1": w1,
        "scale1": scale1,
        "bias1": bias1,
        "w": w,
        "scale": scale,
        "bias": bias,
        "residual": residual,
        "out": out,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "rows_in_all": m,
        "eps": eps,
        "hidden_levels": hidden_levels,
    }
    constants = {
        "C": c,
        "HIDDEN": hidden,
        "POST": norm_weight is not None,
        "SIDE": out.shape[1],
        "BM": t.rows,
        "BH": t.inner,
        "BC": t.columns,
    }
    return PreparedLaunch(mlp.mlp, (-(-m // t.rows),), arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
