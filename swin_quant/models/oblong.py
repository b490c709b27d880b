"""Windows of any height and width: their tables of relative positions, and maps cut into them.

A window is (h, w) tokens, L = h * w. For squares all is as in `windows`; timm has the same for other windows.
"""

import torch
from torch import Tensor

from swin_quant.models.windows import MASKED, relative_coords_table, relative_position_index

Window = tuple[int, int]


def offsets_in(window: Window) -> int:
    """How many offsets, (2h - 1) * (2w - 1), two tokens of a window may have."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def offset_index(window: Window) -> Tensor:
    """int64 [L, L]: the row of the bias table, which has one for each offset, for two tokens of a window."""
    high, wide = window
    if high == wide:
        return relative_position_index(high)
    y, x = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    y, x = y.flatten(), x.flatten()
    return (y[:, None] - y + high - 1) * (2 * wide - 1) + (x[:, None] - x + wide - 1)


def offset_coordinates(window: Window, pretrained: int = 0) -> Tensor:
    """float32 [1, 2h - 1, 2w - 1, 2]: the coordinates of every offset, each side as in a square window of that side."""
    rows, columns = (relative_coords_table(side, pretrained)[0].diagonal()[0] for side in window)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)[None]


def cut(x: Tensor, window: Window) -> Tensor:
    """[B, H, W, C] -> [B, nW, L, C], the windows of a map row by row."""
    batch, height, width, channels = x.shape
    high, wide = window
    rows, columns = height // high, width // wide
    x = x.reshape(batch, rows, high, columns, wide, channels)
    return x.transpose(2, 3).reshape(batch, rows * columns, high * wide, channels)


def joined(windows: Tensor, window: Window, height: int, width: int) -> Tensor:
    """[B, nW, L, C] -> [B, H, W, C]: the inverse of `cut`."""
    (batch, *_, channels), (high, wide) = windows.shape, window
    x = windows.reshape(batch, height // high, width // wide, high, wide, channels)
    return x.transpose(2, 3).reshape(batch, height, width, channels)


def mask(height: int, width: int, window: Window, shift: Window) -> Tensor:
    """float32 [nW, L, L]: 0 where two tokens of a shifted window were neighbours before the shift, else -100."""
    rows, columns = (_parts(*side) for side in zip((height, width), window, shift, strict=True))
    region = cut((3 * rows[:, None] + columns)[None, :, :, None], window).squeeze(-1).squeeze(0)
    return torch.where(region[:, :, None] == region[:, None, :], 0.0, MASKED)


def _parts(length: int, window: int, shift: int) -> Tensor:
    """int64 [length]: which of the three parts of a shifted axis each place belongs to."""
    places = torch.arange(length)
    return (places >= length - window).long() + (places >= length - shift)
