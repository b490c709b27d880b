"""The end of a branch in V2: its norm, and the sum with the residual stream at each token's place on the map."""

from dataclasses import dataclass

from torch import Tensor

from swin_quant.backends.cuda.kernels.arithmetic import as_type, normed
from swin_quant.backends.cuda.kernels.call import ALL_REGISTERS, PreparedLaunch
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, row_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


@dataclass(frozen=True, eq=False)
class NormResidualKernel(Kernel):
    """out = LayerNorm(y) + residual at the row's token; out_quantized = the same sum, not rounded to half, times
    `levels`."""

    y: Tensor  # half or float32 [M, C] in window order
    weight: Tensor  # [C], as bias
    bias: Tensor
    eps: float
    residual: Tensor | None  # half [B, R, R, C]; may be out; None: V2's merging
    windows: Windows
    out: Tensor  # half [B, R, R, C]
    levels: float | None = None  # None: out_quantized is half
    out_quantized: Tensor | None = None  # int8, float8 or half [M, C] in map order

    def reference(self) -> None:
        channels, quantized = self.y.shape[-1], self.out_quantized
        tokens = self.windows.all_tokens(self.y.shape[0], self.y.device)
        total = normed(self.y, self.weight, self.bias, self.eps)
        if self.residual is not None:
            total = total + self.residual.view(-1, channels)[tokens].float()
        self.out.view(-1, channels)[tokens] = total.to(self.out.dtype)
        if quantized is not None:
            quantized[tokens] = as_type(total if self.levels is None else total * self.levels, quantized.dtype)

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        m, channels = self.y.shape
        t = (tiles or row_tiles(channels)).holding(columns=channels)
        constants = {"C": channels, **self.windows.constants(), "ROWS": t.rows, "BLOCK": t.columns}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("rows.norm_residual", grid, arguments, constants, t, ALL_REGISTERS)
