"""The last norm and the mean over a picture's tokens: the input of the head."""

from dataclasses import dataclass

from torch import Tensor

from swin_quant.backends.cuda.kernels.arithmetic import normed
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, pool_tiles


@dataclass(frozen=True, eq=False)
class PoolKernel(Kernel):
    """out = the mean over tokens of LayerNorm(x * factors)."""

    x: Tensor  # half [B, R, R, C]
    weight: Tensor  # [C], as bias
    bias: Tensor
    eps: float
    out: Tensor  # float32 or half [B, C]
    factors: Tensor | None = None  # float32 [C]
    half_steps: bool = False  # round the norm's result to half (FT)

    def reference(self) -> None:
        tokens = self.x.flatten(1, 2)
        tokens = tokens if self.factors is None else tokens.float() * self.factors
        y = normed(tokens, self.weight, self.bias, self.eps)
        self.out.copy_((y.to(self.x.dtype).float() if self.half_steps else y).mean(1))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (batch, channels), tokens = self.out.shape, self.x.shape[1] * self.x.shape[2]
        t = (tiles or pool_tiles(channels, tokens)).holding(columns=channels)
        constants = {"C": channels, "TOKENS": tokens, "HALF_STEPS": self.half_steps}
        constants |= {"ROWS": t.rows, "BLOCK": t.columns}
        return PreparedLaunch("rows.pool", (batch,), self.values(), constants, t)
