"""How references store results."""

import torch
from torch import Tensor

from swin_quant.backends.integer_arithmetic import rounded

LARGEST_E4M3 = 448.0


def as_type(x: Tensor, dtype: torch.dtype, levels: float | None = None) -> Tensor:
    """x, times `levels` if given, in the type of a result: rounded and saturated to int8, a NaN as 0; saturated to
    float8 (E4M3); or converted to a float type."""
    x = x if levels is None else x * levels
    if dtype == torch.int8:
        return rounded(x).nan_to_num(0.0).to(dtype)
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)
