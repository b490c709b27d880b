"""Square windows: partition, its inverse, and the coordinates of Swin V2. `models.maps` has the rest.

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


def relative_coords_table(window: int, pretrained_window: int = 0) -> Tensor:
    """float32 [1, 2w - 1, 2w - 1, 2]: log-spaced relative coordinates, the input of Swin V2's position MLP.

    Coordinates are normalised by the window of the pre-training, if there was one, so that a model with a larger window
    gets the values that it was trained on, and larger ones. (Liu et al., Swin Transformer V2, 2022.)
    """
    offsets = torch.arange(1 - window, window, dtype=torch.float32)
    offsets = 8 * offsets / ((pretrained_window or window) - 1)
    offsets = torch.sign(offsets) * torch.log2(offsets.abs() + 1) / math.log2(8)
    return torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), dim=-1)[None]
