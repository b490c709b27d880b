"""fc1, GELU, fc2 and the residual, in V2 with its norm: the hidden channels stay on the chip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.rows import NormResidualKernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, least_step, mlp_tiles
from swin_quant.backends.cuda.kernels.windows import whole_map


@dataclass(frozen=True, eq=False)
class MlpKernel(Kernel):
    """out = fc2(GELU(fc1(a))) + residual, rows in map order. Operands are all int8, all float8 or all half.

    C and H must be multiples of 32.
    """

    a: Tensor  # [M, C]
    w1: Tensor  # [H, C]
    scale1: Tensor | None  # float32 [H], as bias1; both hold the levels
    bias1: Tensor
    hidden_levels: float | None  # None: operands are half
    w: Tensor  # [C, H]
    scale: Tensor | None  # float32 [C], as bias
    bias: Tensor | None
    residual: Tensor  # half [B, R, R, C]; may be out
    out: Tensor  # half [B, R, R, C]
    norm_weight: Tensor | None = None  # float32 [C], as norm_bias: V2's norm, before the residual is added
    norm_bias: Tensor | None = None
    eps: float = 0.0

    def reference(self) -> None:
        rows, flat = len(self.a), whole_map(self.out.shape[1])
        hidden = torch.empty(rows, len(self.w1), dtype=self.a.dtype, device=self.a.device)
        GemmKernel(
            self.a, self.w1, self.scale1, self.bias1, Epilogue("gelu"), hidden, levels=self.hidden_levels
        ).reference()
        fc2 = hidden, self.w, self.scale, self.bias
        if self.norm_weight is None or self.norm_bias is None:
            GemmKernel(*fc2, Epilogue("residual"), self.out, flat, self.residual).reference()
        else:
            branch = torch.empty(rows, len(self.w), dtype=self.out.dtype, device=self.a.device)
            GemmKernel(*fc2, Epilogue("half"), branch).reference()
            NormResidualKernel(
                branch, self.norm_weight, self.norm_bias, self.eps, self.residual, flat, self.out
            ).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (m, c), hidden, post = self.a.shape, self.w1.shape[0], self.norm_weight is not None
        least = least_step(self.a.element_size())
        t = (tiles or mlp_tiles(m, c, hidden, self.a.dtype, post)).holding(columns=least, inner=least)
        t = t.dividing(columns=c, inner=hidden)
        constants = {"C": c, "HIDDEN": hidden, "POST": post, "SIDE": self.out.shape[1]}
        constants |= {"BM": t.rows, "BH": t.inner, "BC": t.columns}
        return PreparedLaunch("mlp.mlp", (-(-m // t.rows),), self.values(rows_in_all=m), constants, t)
