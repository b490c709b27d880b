"""A linear, its residual and the norm after it; in V2 the norm comes before the residual."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.rows import NormQuantizeKernel, NormResidualKernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, gemm_norm_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map


@dataclass(frozen=True, eq=False)
class GemmNormKernel(Kernel):
    """V1: out = a w^T + residual, and `out_quantized` = norm(out) * levels for fc1: `GemmKernel`, then
    `NormQuantizeKernel`. With `post` (V2): out = norm(a w^T) + residual, and `out_quantized` = out * levels:
    `GemmKernel`, then `NormResidualKernel`; V2's merging has no residual. N and K must be multiples of 32."""

    a: Tensor  # [M, K] in window order
    w: Tensor  # [N, K]
    scale: Tensor | None  # float32 [N], as bias
    bias: Tensor | None
    windows: Windows
    residual: Tensor | None  # half [B, R, R, N]; may be out
    out: Tensor  # half [B, R, R, N], rows in map order
    norm_weight: Tensor  # float32 [N], as norm_bias
    norm_bias: Tensor
    eps: float
    levels: float | None = None
    out_quantized: Tensor | None = None  # [M, N] in map order
    post: bool = False

    def reference(self) -> None:
        norm = self.norm_weight, self.norm_bias, self.eps
        if self.post:
            branch = torch.empty(len(self.a), len(self.w), dtype=self.out.dtype, device=self.a.device)
            GemmKernel(self.a, self.w, self.scale, self.bias, Epilogue("half"), branch).reference()
            NormResidualKernel(
                branch, *norm, self.residual, self.windows, self.out, self.levels, self.out_quantized
            ).reference()
        else:
            assert self.out_quantized is not None
            GemmKernel(
                self.a, self.w, self.scale, self.bias, Epilogue("residual"), self.out, self.windows, self.residual
            ).reference()
            flat = whole_map(self.out.shape[1])
            NormQuantizeKernel(self.out, *norm, self.levels, flat, self.out_quantized).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (m, k), n, size = self.a.shape, self.w.shape[0], self.a.element_size()
        t = (tiles or gemm_norm_tiles(m, n, k, size)).holding(inner=least_step(size)).dividing(columns=n, inner=k)
        constants = {"N": n, "K": k, "POST": self.post, **self.windows.constants()}
        constants |= {"BM": t.rows, "BN": t.columns, "BK": t.inner}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("gemm_norm.gemm_norm", grid, arguments, constants, t)
