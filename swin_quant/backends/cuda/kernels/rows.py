"""Kernels that read whole rows, the channels of a token: patch embedding, norms with what follows them, the pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.kernel import ALL_REGISTERS, Kernel, PreparedLaunch, as_type
from swin_quant.backends.cuda.kernels.tiles import Tiles, patch_tiles, pool_tiles, row_tiles
from swin_quant.backends.cuda.kernels.windows import Windows
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

    def reference(self) -> None:
        images, out = self.images, self.out
        x = images if images.is_floating_point() else images.permute(0, 3, 1, 2)
        batch, channels, height, width = x.shape
        patch = height // out.shape[1]
        x = x.to(self.weight.dtype).float().reshape(batch, channels, height // patch, patch, width // patch, patch)
        y = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), self.weight.float())
        y = y.to(out.dtype) + self.bias.to(out.dtype) if self.half_steps else y * self.scale + self.bias.float()
        y = normed(y, self.norm_weight, self.norm_bias, self.eps)
        if self.positions is not None:
            y = y + self.positions.float().view(y.shape[1:])
        out.copy_(y)

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        (batch, side, _, channels), taps = self.out.shape, self.weight.shape[1]
        m, is_last = batch * side * side, not self.images.is_floating_point()
        t = (tiles or patch_tiles(channels, taps)).holding(columns=channels, inner=taps)
        constants = {"C": channels, "SIDE": side, "PATCH": self.images.shape[2] // side}
        constants |= {"IN": self.images.shape[3 if is_last else 1], "CHANNELS_LAST": is_last}
        constants |= {"HALF_STEPS": self.half_steps, "ROWS": t.rows, "BLOCK": t.columns, "BLOCK_K": t.inner}
        arguments, grid = self.values(rows_in_all=m), (-(-m // t.rows),)
        return PreparedLaunch("rows.patch_embed", grid, arguments, constants, t)


@dataclass(frozen=True, eq=False)
class NormQuantizeKernel(Kernel):
    """out = LayerNorm(x) * levels; without levels, weight and bias hold them, or out is half. Tokens are shifted and
    partitioned into windows: the inputs of qkv and fc1."""

    x: Tensor  # half [B, R, R, C]
    weight: Tensor | None  # [C], as bias; None: no norm (V2)
    bias: Tensor | None
    eps: float
    levels: float | None
    windows: Windows
    out: Tensor  # int8, float8 or half [B * R * R, C] in window order

    def reference(self) -> None:
        tokens = self.windows.find_tokens(self.out.shape[0], self.x.device)
        y = normed(self.x.view(-1, self.x.shape[-1])[tokens], self.weight, self.bias, self.eps)
        self.out.copy_(as_type(y, self.out.dtype, self.levels))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        constants = {"C": self.out.shape[1], **self.windows.constants()}
        return _prepare_rows(self, "norm_quantize", self.out.shape, constants, tiles)


@dataclass(frozen=True, eq=False)
class MergeQuantizeKernel(Kernel):
    """`NormQuantizeKernel` of four neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1): patch merging before its
    linear."""

    x: Tensor  # half [B, R, R, C]
    weight: Tensor | None  # [4C], as bias; None: no norm (V2)
    bias: Tensor | None
    eps: float
    levels: float | None
    out: Tensor  # int8, float8 or half [B * (R / 2)^2, 4C]

    def reference(self) -> None:
        merged = torch.cat([self.x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        y = normed(merged.view(-1, merged.shape[-1]), self.weight, self.bias, self.eps)
        self.out.copy_(as_type(y, self.out.dtype, self.levels))

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        constants = {"C": self.x.shape[3], "SIDE": self.x.shape[1]}
        return _prepare_rows(self, "merge_quantize", self.out.shape, constants, tiles)


@dataclass(frozen=True, eq=False)
class NormResidualKernel(Kernel):
    """The end of a branch in V2: out = LayerNorm(y) + residual at the row's token; out_quantized = the same sum, not
    rounded to half, times `levels`."""

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
        tokens = self.windows.find_tokens(self.y.shape[0], self.y.device)
        total = normed(self.y, self.weight, self.bias, self.eps)
        if self.residual is not None:
            total = total + self.residual.view(-1, channels)[tokens].float()
        self.out.view(-1, channels)[tokens] = total.to(self.out.dtype)
        if quantized is not None:
            quantized[tokens] = as_type(total, quantized.dtype, self.levels)

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        constants = {"C": self.y.shape[1], **self.windows.constants()}
        return _prepare_rows(self, "norm_residual", self.y.shape, constants, tiles, ALL_REGISTERS)


@dataclass(frozen=True, eq=False)
class PoolKernel(Kernel):
    """out = the mean over a picture's tokens of LayerNorm(x * factors): the input of the head."""

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


def _prepare_rows(
    kernel: Kernel,
    name: str,
    shape: torch.Size,
    constants: Mapping[str, Any],
    tiles: Tiles | None,
    options: Mapping[str, Any] = {},
) -> PreparedLaunch:
    """The launch of a kernel with rows [M, channels] of this `shape`."""
    m, channels = shape
    t = (tiles or row_tiles(channels)).holding(columns=channels)
    whole = {**constants, "ROWS": t.rows, "BLOCK": t.columns}
    return PreparedLaunch(f"rows.{name}", (-(-m // t.rows),), kernel.values(rows_in_all=m), whole, t, options)
