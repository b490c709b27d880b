"""Normalise, shift, partition into windows and quantize in one pass: what qkv and fc1 are given."""

from torch import Tensor

from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.rounding import as_type
from swin_quant.backends.cuda.kernels.windows import Windows


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    levels: float | None,
    windows: Windows,
    out: Tensor,
) -> None:
    """x half [B, R, R, C] -> out int8 [B * R * R, C] in window order, of LayerNorm(x) * levels.

    Without a weight nothing is normalised (V2). levels None: out is half, and nothing is rounded to int8.
    """
    tokens = windows.all_tokens(out.shape[0], x.device)
    y = normed(x.view(-1, x.shape[-1])[tokens], weight, bias, eps)
    out.copy_(as_type(y if levels is None else y * levels, out.dtype))
