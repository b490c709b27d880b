"""Window attention in one kernel: logits, position bias, shift mask, softmax, and the sum over values.

Alone, and with the rest of its branch: projection, residual and norm.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.arithmetic import as_type
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.gemm_norm import GemmNormKernel
from swin_quant.backends.cuda.kernels.kernel import Kernel
from swin_quant.backends.cuda.kernels.tiles import Tiles, attention_norm_tiles, attention_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.backends.integer_arithmetic import rounded

MASKED = -100.0  # added to the logit of two tokens that only the cyclic shift brought together
_VECTOR = 8  # halves that one load takes


def bias_row(tokens: int) -> int:
    """The length of a position bias row in memory for a window of `tokens`: whole vectors."""
    return -(-tokens // _VECTOR) * _VECTOR


@dataclass(frozen=True, eq=False)
class AttentionKernel(Kernel):
    """qkv in window order -> out.

    logits = q k^T * logits_scale + (position_bias + MASKED between regions). out = context * context_scale. qkv int8 or
    float8 with `softmax_levels`: probabilities have its type, as softmax * softmax_levels. Without: exp(logits -
    largest) is rounded to float16, multiplied with v, and divided by its sum. qkv half: the same in its own type. In V2
    q and k are already normalised, by the epilogue "unit". d: a power of two, at least 32 (narrower heads are padded
    with zeros).

    FasterTransformer's unfused kernels: with `product_levels` logits = int8(q k^T * product_levels) * logits_scale *
    product_step, and softmax_epsilon is added to the sum of exp.
    """

    qkv: Tensor  # int8, float8 or half [M, 3 * heads * d], columns (q | k | v, head, d)
    out: Tensor  # int8, float8 or half [M, heads * d]
    windows: Windows
    heads: int
    logits_scale: Tensor | float  # float32 [heads], or one for all
    position_bias: Tensor  # [heads, L, L or more]: columns after L are padding
    softmax_levels: float | None = None
    context_scale: float = 1.0
    product_levels: float | None = None
    product_step: float = 1.0
    softmax_epsilon: float = 0.0

    def reference(self) -> None:
        length = self.windows.tokens
        head_dim = self.qkv.shape[1] // (3 * self.heads)
        q, k, v = self.qkv.float().view(-1, length, 3, self.heads, head_dim).permute(2, 0, 3, 1, 4)
        logits = self._logits(q, k)
        if self.softmax_levels is not None:
            shares = as_type(_softmax(logits, self.softmax_epsilon) * self.softmax_levels, self.qkv.dtype).float()
            context = shares @ v  # exact for int8: at most 1024 products
        else:
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            operand = powers.to(torch.float16 if self.qkv.dtype.itemsize == 1 else self.qkv.dtype).float()
            context = operand @ v / powers.sum(-1, keepdim=True)
        rows = (context * self.context_scale).transpose(1, 2).flatten(2).flatten(0, 1)
        self.out.copy_(as_type(rows, self.out.dtype))

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """float32 [windows, heads, L, L]."""
        length, windows, scale = self.windows.tokens, self.windows, self.logits_scale
        logits = q @ k.transpose(-2, -1)  # exact for int8
        if self.product_levels is not None:
            logits = rounded(logits * self.product_levels)
        logits = logits * (scale[:, None, None] if isinstance(scale, Tensor) else scale)
        if self.product_levels is not None:
            logits = logits * self.product_step
        added = self.position_bias[..., :length].float()
        if not windows.shift:
            return logits + added
        rows = torch.arange(windows.count * length, device=logits.device)
        region = windows.find_region(rows).view(windows.count, 1, length)
        mask = torch.where(region.unsqueeze(3) == region.unsqueeze(2), 0.0, MASKED)
        return (logits.unflatten(0, (-1, windows.count)) + (added + mask)).flatten(0, 1)

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        """The position bias must have rows of length `bias_row`: it is loaded in whole vectors."""
        m, width = self.out.shape
        length, head_dim = self.windows.tokens, width // self.heads
        windows = m // length
        pictures = windows // self.windows.count
        t = tiles or attention_tiles(length, head_dim, pictures, windows * self.heads)
        t = t.holding(columns=least_step(self.qkv.element_size()))
        arguments = self.values(windows_in_all=windows if t.windows > 1 else None)
        constants = {**_constants(self, head_dim, t), "WINDOWS": t.windows}
        grid = (-(-pictures // t.windows) * self.windows.count * self.heads, -(-length // t.rows))
        options = {"enable_fp_fusion": False} if self.product_levels is not None else {}
        return PreparedLaunch("attention.attention", grid, arguments, constants, t, options)


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
        constants = {"N": n, "POST": self.post, **_constants(self, k // self.heads, t), "BN": t.inner}
        grid = (m // length, -(-length // t.rows))
        return PreparedLaunch("attention.attention_norm", grid, self.values(rows_in_all=m), constants, t)


def _constants(kernel: AttentionKernel | AttentionNormKernel, head_dim: int, t: Tiles) -> dict[str, Any]:
    """The constants of one head's attention."""
    return {
        **kernel.windows.constants(),
        "HEADS": kernel.heads,
        "D": head_dim,
        "BIAS_ROW": kernel.position_bias.stride(1),
        "ONE_SCALE": isinstance(kernel.logits_scale, float),
        "BQ": t.rows,
        "BKEYS": t.columns,
    }


def _softmax(logits: Tensor, epsilon: float) -> Tensor:
    if not epsilon:
        return logits.softmax(-1)
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    return powers * (1 / (powers.sum(-1, keepdim=True) + epsilon))
