"""Kernels fused from others: the norm before a linear, the residual and norm behind it, and whole branches.

What lies between their products stays on the chip.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.attention import AttentionKernel, attention_constants
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel
from swin_quant.backends.cuda.kernels.kernel import ALL_REGISTERS, Kernel, PreparedLaunch
from swin_quant.backends.cuda.kernels.rows import MergeQuantizeKernel, NormQuantizeKernel, NormResidualKernel
from swin_quant.backends.cuda.kernels.tiles import (
    REGISTERS,
    Tiles,
    attention_norm_tiles,
    column_groups,
    gemm_norm_tiles,
    least_step,
    mlp_tiles,
    norm_gemm_tiles,
)
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map


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
        self.part(GemmKernel, a=tokens).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (n, k), m, e = self.w.shape, self.out.shape[0], self.epilogue
        size, piece = self.w.element_size(), self.x.shape[-1]
        t = tiles or norm_gemm_tiles(m, n, k, size, normed=self.norm_weight is not None, piece=piece)
        t = e.whole_heads(t.holding(columns=1, inner=least_step(size)).dividing(inner=piece))
        groups = column_groups(m, n, t.rows, t.columns)
        constants = {"N": n, "K": k, "PIECE": piece, "KIND": e.kind, "HEAD": e.head_dim, **self.windows.constants()}
        constants |= {"BM": t.rows, "BN": t.columns, "BK": t.inner, "GROUP": -(-n // t.columns) // groups}
        options = ALL_REGISTERS if t.warps == 8 and t.rows * k > 2 * REGISTERS else {}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows) * groups,)
        return PreparedLaunch("fused.norm_gemm", grid, arguments, constants, t, options)


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
        given, norm = (self.a, self.w, self.scale, self.bias), (self.norm_weight, self.norm_bias, self.eps)
        if self.post:
            branch = torch.empty(len(self.a), len(self.w), dtype=self.out.dtype, device=self.a.device)
            GemmKernel(*given, Epilogue("half"), branch).reference()
            NormResidualKernel(
                branch, *norm, self.residual, self.windows, self.out, self.levels, self.out_quantized
            ).reference()
        else:
            assert self.out_quantized is not None
            GemmKernel(*given, Epilogue("residual"), self.out, self.windows, self.residual).reference()
            flat = whole_map(self.out.shape[1])
            NormQuantizeKernel(self.out, *norm, self.levels, flat, self.out_quantized).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (m, k), n, size = self.a.shape, self.w.shape[0], self.a.element_size()
        t = (tiles or gemm_norm_tiles(m, n, k, size)).holding(inner=least_step(size)).dividing(columns=n, inner=k)
        constants = {"N": n, "K": k, "POST": self.post, **self.windows.constants()}
        constants |= {"BM": t.rows, "BN": t.columns, "BK": t.inner}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("fused.gemm_norm", grid, arguments, constants, t)


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
        constants = {"N": n, "POST": self.post, **attention_constants(self, k // self.heads, t), "BN": t.inner}
        grid = (m // length, -(-length // t.rows))
        return PreparedLaunch("attention.attention_norm", grid, self.values(rows_in_all=m), constants, t)


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
        fc1, fc2 = (self.a, self.w1, self.scale1, self.bias1), (hidden, self.w, self.scale, self.bias)
        GemmKernel(*fc1, Epilogue("gelu"), hidden, levels=self.hidden_levels).reference()
        if self.norm_weight is None or self.norm_bias is None:
            GemmKernel(*fc2, Epilogue("residual"), self.out, flat, self.residual).reference()
        else:
            branch = torch.empty(rows, len(self.w), dtype=self.out.dtype, device=self.a.device)
            GemmKernel(*fc2, Epilogue("half"), branch).reference()
            norm = self.norm_weight, self.norm_bias, self.eps
            NormResidualKernel(branch, *norm, self.residual, flat, self.out).reference()

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (m, c), hidden, post = self.a.shape, self.w1.shape[0], self.norm_weight is not None
        least = least_step(self.a.element_size())
        t = (tiles or mlp_tiles(m, c, hidden, self.a.dtype, post)).holding(columns=least, inner=least)
        t = t.dividing(columns=c, inner=hidden)
        constants = {"C": c, "HIDDEN": hidden, "POST": post, "SIDE": self.out.shape[1]}
        constants |= {"BM": t.rows, "BH": t.inner, "BC": t.columns}
        return PreparedLaunch("fused.mlp", (-(-m // t.rows),), self.values(rows_in_all=m), constants, t)
