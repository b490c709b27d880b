"""The norm (in V2 the gathering) before a linear, and the linear: the quantized tokens stay on the chip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import ALL_REGISTERS, PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.rows import MergeQuantizeKernel, NormQuantizeKernel
from swin_quant.backends.cuda.kernels.tiles import REGISTERS, Tiles, column_groups, least_step, norm_gemm_tiles
from swin_quant.backends.cuda.kernels.windows import Windows


@dataclass(frozen=True, eq=False)
class NormGemmKernel(Kernel):
    """`NormQuantizeKernel`, then `GemmKernel`; the tokens between them have the type of w.

    With w [N, 4C] it begins with `MergeQuantizeKernel`: x is [B, 2R, 2R, C], and the windows are the whole map of side
    R. C must be a multiple of 32.
    """

    x: Tensor  # half [B, R, R, C]
    norm_weight: Tensor | None  # [C], as norm_bias; None: no norm (V2)
    norm_bias: Tensor | None
    eps: float
    input_levels: float | None
    windows: Windows
    w: Tensor  # [N, C]
    scale: Tensor | None  # float32 [N], as bias
    bias: Tensor | None
    epilogue: Epilogue  # without residual and FasterTransformer's roundings
    out: Tensor  # [B * R * R, N] in window order
    levels: Tensor | float | None = None  # these two as in `GemmKernel`
    lengths: Tensor | None = None

    def reference(self) -> None:
        tokens = torch.empty(len(self.out), self.w.shape[1], dtype=self.w.dtype, device=self.x.device)
        norm = self.x, self.norm_weight, self.norm_bias, self.eps, self.input_levels
        if self.w.shape[1] == 4 * self.x.shape[-1]:
            MergeQuantizeKernel(*norm, tokens).reference()
        else:
            NormQuantizeKernel(*norm, self.windows, tokens).reference()
        GemmKernel(
            tokens, self.w, self.scale, self.bias, self.epilogue, self.out, levels=self.levels, lengths=self.lengths
        ).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (n, k), m, e = self.w.shape, self.out.shape[0], self.epilogue
        size, piece = self.w.element_size(), self.x.shape[-1]
        t = tiles or norm_gemm_tiles(m, n, k, size, normed=self.norm_weight is not None, piece=piece)
        t = e.whole_heads(t.holding(columns=1, inner=least_step(size)).dividing(inner=piece))
        groups = column_groups(m, n, t.rows, t.columns)
        constants = {
            "N": n,
            "K": k,
            "PIECE": piece,
            "KIND": e.kind,
            "HEAD": e.head_dim,
            **self.windows.constants(),
            "BM": t.rows,
            "BN": t.columns,
            "BK": t.inner,
            "GROUP": -(-n // t.columns) // groups,
        }
        options = ALL_REGISTERS if t.warps == 8 and t.rows * k > 2 * REGISTERS else {}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows) * groups,)
        return PreparedLaunch("norm_gemm.norm_gemm", grid, arguments, constants, t, options)
