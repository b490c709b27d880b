"""Pictures to tokens: a matrix product over patches, its norm, positions."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.tiles import Tiles, patch_tiles


def patch_side(images: Tensor, weight: Tensor) -> int:
    """Pixels along a patch, of weight [C, in * patch * patch]."""
    return math.isqrt(weight.shape[1] // channels_of(images))


def channels_of(images: Tensor) -> int:
    """`in`, of float NCHW or uint8 NHWC."""
    return images.shape[1] if images.is_floating_point() else images.shape[3]


def reference(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    out: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    half_steps: bool = False,
) -> None:
    """Pictures float [B, in, S, S] or uint8 [B, S, S, in] -> out half [B, R, R, C].

    weight half [C, in * patch * patch] in the order (channel, line, column); bias [C]. y = product * scale + bias, with
    which the normalisation of uint8 pictures is folded into weight, scale and bias: then the norm (none without
    norm_weight), then positions [R * R, C]. Pixels are taken in the type of the weights. `half_steps` (FT) rounds the
    product to half, and adds the bias in half.
    """
    patch = patch_side(images, weight)
    x = images if images.is_floating_point() else images.permute(0, 3, 1, 2)
    batch, channels, height, width = x.shape
    x = x.to(weight.dtype).float().reshape(batch, channels, height // patch, patch, width // patch, patch)
    y = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), weight.float())
    y = y.to(out.dtype) + bias.to(out.dtype) if half_steps else y * scale + bias.float()
    y = normed(y, norm_weight, norm_bias, eps)
    if positions is not None:
        y = y + positions.float().view(y.shape[1:])
    out.copy_(y)


def call(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    out: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    half_steps: bool = False,
    tiles: Tiles | None = None,
) -> PreparedLaunch:
    """The launch of the same arguments."""
    from swin_quant.backends.cuda.kernels.jit import patch_embed

    batch, side, _, channels = out.shape
    m, taps = batch * side * side, weight.shape[1]
    t = (tiles or patch_tiles(channels, taps)).holding(columns=channels, inner=taps)
    arguments = {
        "images": images,
        "weight": weight,
        "bias": bias,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "positions": positions,
        "out": out,
        "rows_in_all": m,
        "eps": eps,
        "scale": scale,
    }
    constants = {
        "C": channels,
        "SIDE": side,
        "PATCH": patch_side(images, weight),
        "IN": channels_of(images),
        "CHANNELS_LAST": not images.is_floating_point(),
        "HALF_STEPS": half_steps,
        "ROWS": t.rows,
        "BLOCK": t.columns,
        "BLOCK_K": t.inner,
    }
    return PreparedLaunch(patch_embed.patch_embed, (-(-m // t.rows),), arguments, constants, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
