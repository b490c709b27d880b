"""The norm (or, in V2, the gathering) in front of a linear, and the linear: the int8 tokens never leave the chip."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels import gemm, merge_quantize, norm_quantize
from swin_quant.backends.cuda.kernels.call import ALL_REGISTERS, PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue
from swin_quant.backends.cuda.kernels.tiles import REGISTERS, Tiles, column_groups, least_step, norm_gemm_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


def reference(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    input_levels: float | None,
    windows: Windows,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    out: Tensor,
    levels: Tensor | float | None = None,
    lengths: Tensor | None = None,
) -> None:
    """x half [B, R, R, C], w [N, C] -> out [B * R * R, N] in window order: `norm_quantize`, then `gemm`.

    With w [N, 4C] it is `merge_quantize`: x [B, 2R, 2R, C], and the windows are the whole map of R lines. Tokens are
    in the type of w between the two. Of the epilogues those without a residual and FasterTransformer's roundings.
    """
    tokens = torch.empty(len(out), w.shape[1], dtype=w.dtype, device=x.device)
    if merges(x, w):
        merge_quantize.reference(x, norm_weight, norm_bias, eps, input_levels, tokens)
    else:
        norm_quantize.reference(x, norm_weight, norm_bias, eps, input_levels, windows, tokens)
    gemm.reference(tokens, w, scale, bias, epilogue, out, levels=levels, lengths=lengths)


def merges(x: Tensor, w: Tensor) -> bool:
    """Whether a row is four neighbours, as patch merging has them."""
    return w.shape[1] == 4 * x.shape[-1]


def call(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    input_levels: float | None,
    windows: Windows,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    out: Tensor,
    levels: Tensor | float | None = None,
    lengths: Tensor | None = None,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments. C must be a multiple of 32."""
    from swin_quant.backends.cuda.kernels.jit import norm_gemm

    (n, k), m = w.shape, out.shape[0]
    size, piece = w.element_size(), x.shape[-1]
    t = tiles or norm_gemm_tiles(m, n, k, size, normed=norm_weight is not None, piece=piece)
    t = t.holding(columns=1, inner=least_step(size)).dividing(inner=piece)
    columns = epilogue.whole_heads(t.columns)
    groups = column_groups(m, n, t.rows, columns)
    arguments = {
        "x": x,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "w": w,
        "scale": scale,
        "bias": bias,
        "out": out,
        "levels": levels,
        "lengths": lengths,
        "rows_in_all": m,
        "eps": eps,
        "input_levels": input_levels,
    }
    constants = {
        "N": n,
        "K": k,
        "PIECE": piece,
        "KIND": epilogue.kind,
        "HEAD": epilogue.head_dim,
        "ONE_LEVEL": isinstance(levels, float),
        **windows.constants(),
        "BM": t.rows,
        "BN": columns,
        "BK": t.inner,
        "GROUP": -(-n // columns) // groups,
    }
    options = t.options() | (ALL_REGISTERS if t.warps == 8 and t.rows * k > 2 * REGISTERS else {})
    return PreparedLaunch(norm_gemm.norm_gemm, (-(-m // t.rows) * groups,), arguments, constants, options)


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
