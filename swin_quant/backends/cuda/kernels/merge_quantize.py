"""Patch merging before its linear: four neighbours side by side, normalised (V1), quantized."""

from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.rounding import as_type
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, levels: float | None, out: Tensor
) -> None:
    """x half [B, R, R, C] -> out int8 [B * (R / 2)^2, 4C], neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1).

    Without a weight nothing is normalised (V2). levels None: out is half.
    """
    merged = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
    y = normed(merged.view(-1, merged.shape[-1]), weight, bias, eps)
    out.copy_(as_type(y if levels is None else y * levels, out.dtype))


def call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    levels: float | None,
    out: Tensor,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments."""
    from swin_quant.backends.cuda.kernels.jit import rows

    m, channels = out.shape
    t = (tiles or row_tiles(channels)).holding(columns=channels)
    arguments = {"x": x, "weight": weight, "bias": bias, "out": out, "rows_in_all": m, "eps": eps, "levels": levels}
    constants = {"C": x.shape[3], "SIDE": x.shape[1], "ROWS": t.rows, "BLOCK": t.columns}
    return PreparedLaunch(rows.merge_quantize, (-(-m // t.rows),), arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
