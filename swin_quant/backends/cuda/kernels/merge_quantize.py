"""Patch merging before its linear: four neighbours side by side, normalised (V1), quantized."""

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.norms import normed
from swin_quant.backends.cuda.kernels.rounding import as_type


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, levels: float | None, out: Tensor
) -> None:
    """x half [B, R, R, C] -> out int8 [B * (R / 2)^2, 4C], neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1).

    Without a weight nothing is normalised (V2). levels None: out is half.
    """
    merged = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
    y = normed(merged.view(-1, merged.shape[-1]), weight, bias, eps)
    out.copy_(as_type(y if levels is None else y * levels, out.dtype))
