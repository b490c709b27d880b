"""V2's end of a branch: its norm, and the sum with the residual stream where the token lies on the map."""

from typing import Any

from torch import Tensor

from swin_quant.backends.cuda.kernels.call import ALL_REGISTERS, PreparedLaunch
from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.rounding import as_type
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


def reference(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None,
    windows: Windows,
    out: Tensor,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
) -> None:
    """y half or float32 [M, C] in window order -> out half [B, R, R, C]: LayerNorm(y) + residual, at its token.

    `out_quantized` int8 [M, C], in the order of the map, is given the same times `levels`, of the sum before it is
    rounded to half; half, with levels None. out may be the residual itself. residual None: V2's merging.
    """
    channels = y.shape[-1]
    tokens = windows.all_tokens(y.shape[0], y.device)
    total = normed(y, weight, bias, eps)
    if residual is not None:
        total = total + residual.view(-1, channels)[tokens].float()
    out.view(-1, channels)[tokens] = total.to(out.dtype)
    if out_quantized is not None:
        out_quantized[tokens] = as_type(total if levels is None else total * levels, out_quantized.dtype)


def call(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None,
    windows: Windows,
    out: Tensor,
    levels: float | None = None,
    out_quantized: Tensor | None = None,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments."""
    from swin_quant.backends.cuda.kernels.jit import rows

    m, channels = y.shape
    t = (tiles or row_tiles(channels)).holding(columns=channels)
    arguments = {
        "y": y,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "out": out,
        "out_quantized": out_quantized,
        "rows_in_all": m,
        "eps": eps,
        "levels": levels,
    }
    constants = {"C": channels, **windows.constants(), "ROWS": t.rows, "BLOCK": t.columns}
    options = t.options() | ALL_REGISTERS
    return PreparedLaunch(rows.norm_residual, (-(-m // t.rows),), arguments, constants, options)


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
