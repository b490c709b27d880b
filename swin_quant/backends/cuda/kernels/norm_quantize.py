"""Normalise, shift, partition into windows and quantize in one pass: what qkv and fc1 are given."""

from typing import Any

from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.rounding import as_type
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    levels: float | None,
    windows: Windows,
    out: Tensor,
) -> None:
    """x half [B, R, R, C] -> out int8 [B * R * R, C] in window order, of LayerNorm(x) * levels.

    Without a weight nothing is normalised (V2). levels None: out is half, and nothing is rounded to int8.
    """
    tokens = windows.all_tokens(out.shape[0], x.device)
    y = normed(x.view(-1, x.shape[-1])[tokens], weight, bias, eps)
    out.copy_(as_type(y if levels is None else y * levels, out.dtype))


def call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    levels: float | None,
    windows: Windows,
    out: Tensor,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments."""
    from swin_quant.backends.cuda.kernels.jit import rows

    m, channels = out.shape
    t = (tiles or row_tiles(channels)).holding(columns=channels)
    arguments = {"x": x, "weight": weight, "bias": bias, "out": out, "rows_in_all": m, "eps": eps, "levels": levels}
    constants = {"C": channels, **windows.constants(), "ROWS": t.rows, "BLOCK": t.columns}
    return PreparedLaunch(rows.norm_quantize, (-(-m // t.rows),), arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
