"""Maps of tokens of any height and width: pad them, cut them into (shifted) windows, and put them together again.

A window is (h, w) tokens, L = h * w, nW windows a map; those of squares are as in docs/reference, section 1.2, and timm
has the same for others. Zeros are added at the bottom and at the right, as in timm, Microsoft's detection code and
mmdetection. Where windows are shifted, these roll and pad in a different order: see `Cut`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.errors import UsageError

Window = tuple[int, int]
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


def offset_index(window: Window) -> Tensor:
    """int64 [L, L]: the row of the bias table, which has (2h - 1) * (2w - 1), for two tokens of a window."""
    high, wide = window
    y, x = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    y, x = y.flatten(), x.flatten()
    return (y[:, None] - y + high - 1) * (2 * wide - 1) + (x[:, None] - x + wide - 1)


def offset_coordinates(window: Window, pretrained: int = 0) -> Tensor:
    """float32 [1, 2h - 1, 2w - 1, 2]: log-spaced coordinates of every offset, the input of Swin V2's position MLP.

    Each side is normalised as in a square window of that side, or by the window of the pre-training, if there was one:
    a model with a larger window gets the values that it was trained on, and larger ones (Liu et al., 2022).
    """
    offsets = [8 * torch.arange(1 - side, side, dtype=torch.float32) / ((pretrained or side) - 1) for side in window]
    spaced = (torch.sign(each) * torch.log2(each.abs() + 1) / math.log2(8) for each in offsets)
    return torch.stack(torch.meshgrid(*spaced, indexing="ij"), dim=-1)[None]


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
    parts = []  # the part of a shifted axis that each place belongs to, one of three
    for length, side, by in zip((height, width), window, shift, strict=True):
        places = torch.arange(length)
        parts.append((places >= length - side).long() + (places >= length - by))
    region = cut((3 * parts[0][:, None] + parts[1])[None, :, :, None], window).squeeze(-1).squeeze(0)
    return mask_between(region)


def mask_between(regions: Tensor) -> Tensor:
    """float32 [..., L, L]: 0 for two tokens of the same region [..., L], else -100."""
    return torch.where(regions[..., :, None] == regions[..., None, :], 0.0, MASKED)


def pad_up(x: Tensor, multiple: Window) -> Tensor:
    """[B, H, W, C] with zeros at the bottom and the right, so that `multiple` divides H and W."""
    below, right = -x.shape[1] % multiple[0], -x.shape[2] % multiple[1]
    return F.pad(x, (0, 0, 0, right, 0, below)) if below or right else x


def patches(images: Tensor, patch: int) -> Tensor:
    """[B, in, H, W] -> [B, ceil(H / patch), ceil(W / patch), in * patch * patch], channels outermost."""
    x = pad_up(images.permute(0, 2, 3, 1), (patch, patch))
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return x.permute(0, 1, 3, 5, 2, 4).flatten(3)


def neighbours(x: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), 4C]: the four in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
    x = pad_up(x, (2, 2))
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3)


@dataclass(frozen=True)
class Cut:
    """The cut of a map into windows of height and width `window`, rolled up and left by `shift`.

    `pad_first`: zeros are added, then the map is rolled, as in Microsoft's detection code and mmdetection. Otherwise
    the map is rolled first, as in timm: both agree without zeros or without a shift. The mask is the same. `rests`: a
    map whose shorter side is one window is not shifted, and a smaller map is refused, as in mmpretrain.
    """

    window: Window
    shift: Window = (0, 0)
    pad_first: bool = False
    rests: bool = False

    def partition(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, nW, L, C]."""
        if self.pad_first:
            x = pad_up(x, self.window)
        if any(shift := self.choose_shift(x)):
            x = torch.roll(x, [-by for by in shift], dims=(1, 2))
        return cut(pad_up(x, self.window), self.window)

    def reverse(self, windows: Tensor, like: Tensor) -> Tensor:
        """[B, nW, L, C] -> [B, H, W, C] of `like`: the inverse of `partition`."""
        height, width = like.shape[1:3]
        x = joined(windows, self.window, *self._padded(like))
        if not self.pad_first:
            x = x[:, :height, :width]
        if any(shift := self.choose_shift(like)):
            x = torch.roll(x, shift, dims=(1, 2))
        return x[:, :height, :width]

    def mask(self, like: Tensor) -> Tensor | None:
        """[nW, L, L] for a map [B, H, W, C]; None without a shift."""
        shift = self.choose_shift(like)
        return mask(*self._padded(like), self.window, shift).to(like.device) if any(shift) else None

    def choose_shift(self, like: Tensor) -> Window:
        """The shift on a map [B, H, W, C]. UsageError for a map that mmpretrain refuses."""
        if self.rests and (shorter := min(like.shape[1:3])) <= self.window[0]:
            if shorter < self.window[0]:
                raise UsageError(
                    f"a map of {like.shape[1]} x {like.shape[2]} is smaller than a window of {self.window[0]}, which "
                    "mmpretrain refuses: give larger pictures, or MODEL.FEATURES.WINDOWS detection for pad_small_map"
                )
            return 0, 0
        return self.shift

    def _padded(self, like: Tensor) -> tuple[int, int]:
        """Height and width of a map [B, H, W, C] whose windows are whole."""
        high, wide = (size + -size % side for size, side in zip(like.shape[1:3], self.window, strict=True))
        return high, wide
