"""Layer normalisation in float32, which several operations begin or end with."""

import torch.nn.functional as F
from torch import Tensor


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """float32 of x [..., C] of any float type; without a weight x itself."""
    if weight is None:
        return x.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
