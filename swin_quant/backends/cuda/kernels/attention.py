"""Window attention in one kernel: logits, position bias, shift mask, softmax, and the sum over values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.kernel import Kernel, PreparedLaunch, as_type
from swin_quant.backends.cuda.kernels.tiles import Tiles, attention_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows
from swin_quant.models.maps import mask

_VECTOR = 8  # halves that one load takes


def bias_row(tokens: int) -> int:
    """The length of a position bias row in memory for a window of `tokens`: whole vectors."""
    return -(-tokens // _VECTOR) * _VECTOR


@dataclass(frozen=True, eq=False)
class AttentionKernel(Kernel):
    """qkv in window order -> out.

    logits = q k^T * logits_scale + (position_bias - 100 between regions). out = context * context_scale. qkv int8 or
    float8 with `softmax_levels`: probabilities have its type, as softmax * softmax_levels. Without: exp(logits -
    largest) is rounded to float16, multiplied with v, and divided by its sum. qkv half: the same in its own type. In V2
    q and k are already normalised, by the epilogue "unit". d: a power of two, at least 32 (narrower heads are padded
    with zeros).
    """

    qkv: Tensor  # int8, float8 or half [M, 3 * heads * d], columns (q | k | v, head, d)
    out: Tensor  # int8, float8 or half [M, heads * d]
    windows: Windows
    heads: int
    logits_scale: Tensor | float  # float32 [heads], or one for all
    position_bias: Tensor  # [heads, L, L or more]: columns after L are padding
    softmax_levels: float | None = None
    context_scale: float = 1.0

    def reference(self) -> None:
        length = self.windows.tokens
        head_dim = self.qkv.shape[1] // (3 * self.heads)
        q, k, v = self.qkv.float().view(-1, length, 3, self.heads, head_dim).permute(2, 0, 3, 1, 4)
        scale, side, window, shift = self.logits_scale, self.windows.side, self.windows.window, self.windows.shift
        # exact for int8
        logits = q @ k.transpose(-2, -1) * (scale[:, None, None] if isinstance(scale, Tensor) else scale)
        added = self.position_bias[None, ..., :length].float()  # [1 or windows of a picture, heads, L, L]
        if shift:
            added = added + mask(side, side, (window, window), (shift, shift)).to(added.device)[:, None]
        logits = (logits.unflatten(0, (-1, len(added))) + added).flatten(0, 1)
        if self.softmax_levels is not None:
            shares = as_type(logits.softmax(-1) * self.softmax_levels, self.qkv.dtype).float()
            context = shares @ v  # exact for int8: at most 1024 products
        else:
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            operand = powers.to(torch.float16 if self.qkv.dtype.itemsize == 1 else self.qkv.dtype).float()
            context = operand @ v / powers.sum(-1, keepdim=True)
        rows = (context * self.context_scale).transpose(1, 2).flatten(2).flatten(0, 1)
        self.out.copy_(as_type(rows, self.out.dtype))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        """The position bias must have rows of length `bias_row`: it is loaded in whole vectors."""
        m, width = self.out.shape
        length, head_dim = self.windows.tokens, width // self.heads
        windows = m // length
        pictures = windows // self.windows.count
        t = tiles or attention_tiles(length, head_dim, pictures, windows * self.heads)
        t = t.holding(columns=least_step(self.qkv.element_size()))
        arguments = self.values(windows_in_all=windows if t.windows > 1 else None)
        constants = {**attention_constants(self, head_dim, t), "WINDOWS": t.windows}
        grid = (-(-pictures // t.windows) * self.windows.count * self.heads, -(-length // t.rows))
        return PreparedLaunch("attention.attention", grid, arguments, constants, t)


def attention_constants(kernel: Any, head_dim: int, t: Tiles) -> dict[str, Any]:
    """The constants of one head's attention, alone or fused (`kernel`)."""
    return {
        **kernel.windows.constants(),
        "HEADS": kernel.heads,
        "D": head_dim,
        "BIAS_ROW": kernel.position_bias.stride(1),
        "ONE_SCALE": isinstance(kernel.logits_scale, float),
        "BQ": t.rows,
        "BKEYS": t.columns,
    }
