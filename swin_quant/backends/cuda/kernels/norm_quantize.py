"""Normalise, shift, partition into windows and quantize in one pass: the inputs of qkv and fc1."""

from dataclasses import dataclass

from torch import Tensor

from swin_quant.backends.cuda.kernels.arithmetic import as_type, normed
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


@dataclass(frozen=True, eq=False)
class NormQuantizeKernel(Kernel):
    """out = LayerNorm(x) * levels; without levels, weight and bias hold them, or out is half."""

    x: Tensor  # half [B, R, R, C]
    weight: Tensor | None  # [C], as bias; None: no norm (V2)
    bias: Tensor | None
    eps: float
    levels: float | None
    windows: Windows
    out: Tensor  # int8, float8 or half [B * R * R, C] in window order

    def reference(self) -> None:
        tokens = self.windows.all_tokens(self.out.shape[0], self.x.device)
        y = normed(self.x.view(-1, self.x.shape[-1])[tokens], self.weight, self.bias, self.eps)
        self.out.copy_(as_type(y if self.levels is None else y * self.levels, self.out.dtype))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        m, channels = self.out.shape
        t = (tiles or row_tiles(channels)).holding(columns=channels)
        constants = {"C": channels, **self.windows.constants(), "ROWS": t.rows, "BLOCK": t.columns}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("rows.norm_quantize", grid, arguments, constants, t)
