"""Window attention on int8 values as one operator: what a plugin of an engine takes, and what it is to compute."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def attention(levels: Tensor, constant: Tensor, heads: int, scales: Sequence[float]) -> Any:
    """softmax(q k^T + constant) v of windows. int8 [B, T, C].

    levels: int8 [B, T, 3C], q, k and v side by side, tokens window by window; constant: float32 [nW * heads, L, L], for
    windows that come in rounds of nW. scales: of q, k, v, of the softmax where it is rounded to int8, and of the
    result.
    """
    if has_torch_function((levels, constant)):
        return handle_torch_function(attention, (levels, constant), levels, constant, heads, scales)
    of_q, of_k, of_v, *of_softmax, of_result = scales
    batch, tokens, channels = levels.shape
    windows, length, depth = constant.shape[0] // heads, constant.shape[-1], channels // (3 * heads)
    x = levels.float().view(-1, windows, length, 3, heads, depth).permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
    logits = (x[0] * of_q) @ (x[1] * of_k).transpose(-2, -1) + constant
    shares = logits.softmax(dim=-1)
    for scale in of_softmax:
        shares = _rounded(shares, scale) * scale
    x = (shares @ (x[2] * of_v)).view(-1, windows, heads, length, depth).transpose(2, 3)
    return _rounded(x.reshape(batch, tokens, heads * depth), of_result).to(torch.int8)


def _rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).round().clamp(-128, 127)
