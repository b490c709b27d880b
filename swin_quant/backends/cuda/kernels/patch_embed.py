"""Patch embedding: a matrix product over patches, its norm, and position embeddings."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.kernel import Kernel, PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles, patch_tiles
from swin_quant.backends.integer_arithmetic import normed


@dataclass(frozen=True, eq=False)
class PatchEmbedKernel(Kernel):
    """out = norm(product * scale + bias) + positions. The normalisation of uint8 pictures is part of weight, scale and
    bias. Pixels are converted to the type of the weights."""

    images: Tensor  # float [B, in, S, S] or uint8 [B, S, S, in]
    weight: Tensor  # half [C, in * patch * patch] in the order (channel, line, column)
    bias: Tensor  # [C]
    norm_weight: Tensor | None  # [C], as norm_bias; None: no norm
    norm_bias: Tensor | None
    eps: float
    out: Tensor  # half [B, R, R, C]
    scale: float = 1.0
    positions: Tensor | None = None  # [R * R, C]
    half_steps: bool = False  # the product is rounded to half, and the bias added in half (FT)

    @property
    def channels(self) -> int:
        """The pictures' channels, `in`."""
        return self.images.shape[1] if self.images.is_floating_point() else self.images.shape[3]

    @property
    def patch(self) -> int:
        """Pixels along a side of a patch."""
        return math.isqrt(self.weight.shape[1] // self.channels)

    def reference(self) -> None:
        patch, images, out = self.patch, self.images, self.out
        x = images if images.is_floating_point() else images.permute(0, 3, 1, 2)
        batch, channels, height, width = x.shape
        x = x.to(self.weight.dtype).float().reshape(batch, channels, height // patch, patch, width // patch, patch)
        y = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), self.weight.float())
        y = y.to(out.dtype) + self.bias.to(out.dtype) if self.half_steps else y * self.scale + self.bias.float()
        y = normed(y, self.norm_weight, self.norm_bias, self.eps)
        if self.positions is not None:
            y = y + self.positions.float().view(y.shape[1:])
        out.copy_(y)

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        batch, side, _, channels = self.out.shape
        m, taps = batch * side * side, self.weight.shape[1]
        t = (tiles or patch_tiles(channels, taps)).holding(columns=channels, inner=taps)
        constants = {
            "C": channels,
            "SIDE": side,
            "PATCH": self.patch,
            "IN": self.channels,
            "CHANNELS_LAST": not self.images.is_floating_point(),
            "HALF_STEPS": self.half_steps,
            "ROWS": t.rows,
            "BLOCK": t.columns,
            "BLOCK_K": t.inner,
        }
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("patch_embed.patch_embed", grid, arguments, constants, t)
