"""Window attention and the rest of its branch, projection, residual and norm, in one kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.attention import AttentionKernel
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm_norm import GemmNormKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, attention_norm_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows


@dataclass(frozen=True, eq=False)
class AttentionNormKernel(Kernel):
    """`AttentionKernel`, with a context [M, heads * d] of w's type, then `GemmNormKernel`; the arguments are theirs."""

    qkv: Tensor
    windows: Windows
    heads: int
    logits_scale: Tensor | float
    position_bias: Tensor
    w: Tensor  # [N, heads * d]; N must be a multiple of 32
    scale: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float
    softmax_levels: float | None = None
    context_scale: float = 1.0
    levels: float | None = None
    out_quantized: Tensor | None = None
    post: bool = False

    def reference(self) -> None:
        context = torch.empty(len(self.qkv), self.w.shape[1], dtype=self.w.dtype, device=self.qkv.device)
        self.part(AttentionKernel, out=context).reference()
        self.part(GemmNormKernel, a=context).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        m, (n, k), length = self.qkv.shape[0], self.w.shape, self.windows.tokens
        t = (tiles or attention_norm_tiles(length, n)).holding(columns=least_step(self.qkv.element_size()))
        t = t.dividing(inner=n)
        constants = {
            "N": n,
            "POST": self.post,
            **self.windows.constants(),
            "HEADS": self.heads,
            "D": k // self.heads,
            "BIAS_ROW": self.position_bias.stride(1),
            "ONE_SCALE": isinstance(self.logits_scale, float),
            "BQ": t.rows,
            "BKEYS": t.columns,
            "BN": t.inner,
        }
        grid = (m // length, -(-length // t.rows))
        return PreparedLaunch("attention.attention_norm", grid, self.values(rows_in_all=m), constants, t)
