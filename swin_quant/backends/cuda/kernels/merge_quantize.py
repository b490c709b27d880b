"""Patch merging before its linear: concatenate four neighbours, normalise (V1), quantize."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.arithmetic import as_type, normed
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles


@dataclass(frozen=True, eq=False)
class MergeQuantizeKernel(Kernel):
    """`NormQuantizeKernel` of four neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1)."""

    x: Tensor  # half [B, R, R, C]
    weight: Tensor | None  # [4C], as bias; None: no norm (V2)
    bias: Tensor | None
    eps: float
    levels: float | None
    out: Tensor  # int8, float8 or half [B * (R / 2)^2, 4C]

    def reference(self) -> None:
        merged = torch.cat([self.x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        y = normed(merged.view(-1, merged.shape[-1]), self.weight, self.bias, self.eps)
        self.out.copy_(as_type(y if self.levels is None else y * self.levels, self.out.dtype))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        m, channels = self.out.shape
        t = (tiles or row_tiles(channels)).holding(columns=channels)
        constants = {"C": self.x.shape[3], "SIDE": self.x.shape[1], "ROWS": t.rows, "BLOCK": t.columns}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("rows.merge_quantize", grid, arguments, constants, t)
