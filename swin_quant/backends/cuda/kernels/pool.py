"""The last norm, and the mean over a picture's tokens: the features that the head is given."""

from typing import Any

from torch import Tensor

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.tiles import Tiles, pool_tiles


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, factors: Tensor | None = None,
    half_steps: bool = False,
) -> None:  # fmt: skip
    """x half [B, R, R, C] -> out float32 or half [B, C]; `half_steps` rounds the norm's result to half (FT).

    `factors` float32 [C], which channels are multiplied by first.
    """
    tokens = x.flatten(1, 2)
    y = normed(tokens if factors is None else tokens.float() * factors, weight, bias, eps)
    out.copy_((y.to(x.dtype).float() if half_steps else y).mean(1))


def call(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, factors: Tensor | None = None,
    half_steps: bool = False, tiles: Tiles | None = None,
) -> PreparedLaunch:  # fmt: skip
    """The launch of the same arguments."""
    from swin_quant.backends.cuda.kernels.jit import rows

    (batch, channels), tokens = out.shape, x.shape[1] * x.shape[2]
    t = (tiles or pool_tiles(channels, tokens)).holding(columns=channels)
    arguments = {"x": x, "weight": weight, "bias": bias, "factors": factors, "out": out, "eps": eps}
    constants = {"C": channels, "TOKENS": tokens, "HALF_STEPS": half_steps}
    return PreparedLaunch(rows.pool, (batch,), arguments, constants | {"ROWS": t.rows, "BLOCK": t.columns}, t.options())


def launch(**arguments: Any) -> None:
    """What `reference` computes, by the kernel; `tiles` besides."""
    call(**arguments).run()
