"""Geometry of shifted windows: partition, its inverse, and the tables that depend only on geometry.

All functions are pure; definitions are from docs/reference, section 1.2. H, W: map height and width in tokens; w:
window side; L = w * w tokens a window; nW = (H / w) * (W / w) windows a picture.
"""

import math

import torch
from torch import Tensor

MASKED = -100.0  # added to the logit of two tokens that only the cyclic shift brought together


def window_partition(x: Tensor, window: int) -> Tensor:
    """[B, H, W, C] -> [B * nW, L, C], the windows of a picture row by row."""
    _, height, width, channels = x.shape
    x = x.view(-1, height // window, window, width // window, window, channels)
    return x.transpose(2, 3).reshape(-1, window * window, channels)


def window_reverse(windows: Tensor, window: int, height: int, width: int) -> Tensor:
    """[B * nW, L, C] -> [B, H, W, C]: the inverse of `window_partition`."""
    x = windows.view(-1, height // window, width // window, window, window, windows.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, windows.shape[-1])


def relative_position_index(window: int) -> Tensor:
    """int64 [L, L]: the row of the [(2w - 1)**2, heads] bias table that holds the bias of two tokens of a window."""
    y, x = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    y, x = y.flatten(), x.flatten()
    return (y[:, None] - y + window - 1) * (2 * window - 1) + (x[:, None] - x + window - 1)


def attention_mask(height: int, window: int, shift: int, width: int | None = None) -> Tensor:
    """float32 [nW, L, L]: 0 if two tokens of a shifted window were neighbours before the shift, else -100.

    For a map of `height` x `width` tokens, square if no width is given.
    """
    width = height if width is None else width
    region = (3 * _bands(height, window, shift)[:, None] + _bands(width, window, shift)).view(1, height, width, 1)
    region = window_partition(region, window).squeeze(-1)
    return torch.where(region[:, :, None] == region[:, None, :], 0.0, MASKED)


def _bands(length: int, window: int, shift: int) -> Tensor:
    """float32 [length]: the part, of three, of a shifted axis that each place belongs to."""
    band = torch.zeros(length)
    band[-window:-shift] = 1
    band[-shift:] = 2
    return band


def relative_coords_table(window: int, pretrained_window: int = 0) -> Tensor:
    """float32 [1, 2w - 1, 2w - 1, 2]: log-spaced relative coordinates, the input of Swin V2's position MLP.

    Coordinates are normalised by the window of the pre-training, if there was one, so that a model with a larger window
    gets the values that it was trained on, and larger ones. (Liu et al., Swin Transformer V2, 2022.)
    """
    offsets = torch.arange(1 - window, window, dtype=torch.float32)
    offsets = 8 * offsets / ((pretrained_window or window) - 1)
    offsets = torch.sign(offsets) * torch.log2(offsets.abs() + 1) / math.log2(8)
    return torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), dim=-1)[None]
