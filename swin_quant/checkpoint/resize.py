"""Resizing tables of positions for windows and pictures of another size than in training.

V1's biases are a table of (2w - 1)^2 places a head; absolute positions are a table with a place a token. Microsoft's
code interpolates both bicubically. timm's puts the places of a bias closer together near the centre, so timm itself
resizes its own files. V2 has a network for its biases: its coordinates follow from the configuration.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from swin_quant.base.compat import import_timm
from swin_quant.base.progress import log

_BIASES, _POSITIONS = "relative_position_bias_table", "absolute_pos_embed"


def resized(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path, by_timm: bool) -> dict[str, Tensor]:
    """`given` with its tables of positions resized to the shapes in `wanted`, and logged."""
    found, changed = dict(given), []
    for key, value in given.items():
        shape = wanted[key].shape if key in wanted else value.shape
        if value.shape == shape or not value.is_floating_point() or not _are_squares(key, value.shape, shape):
            continue
        if key.endswith(_POSITIONS):
            found[key] = _bicubic(value[0].float(), shape[1])[None]
        elif by_timm:
            window = (math.isqrt(shape[0]) + 1) // 2
            resize = import_timm().layers.resize_rel_pos_bias_table
            found[key] = resize(value.float(), new_window_size=(window, window), new_bias_shape=tuple(shape))
        else:
            found[key] = _bicubic(value.float(), shape[0])
        changed.append(f"{key} {list(value.shape)} to {list(shape)}")
    if changed:
        log.warning(
            "%s: %d tables of positions were interpolated as %s code does: %s, ...",
            file,
            len(changed),
            "timm's" if by_timm else "Microsoft's",
            changed[0],
        )
    return found


def _are_squares(key: str, one: torch.Size, other: torch.Size) -> bool:
    """Whether both are tables over a square, with the same heads or channels."""
    if key.endswith(_BIASES):
        return len(one) == len(other) == 2 and one[1] == other[1] and all(map(_is_square, (one[0], other[0])))
    if not key.endswith(_POSITIONS) or not len(one) == len(other) == 3:
        return False
    return (one[0], one[2]) == (1, other[2]) and other[0] == 1 and all(map(_is_square, (one[1], other[1])))


def _is_square(places: int) -> bool:
    return places > 0 and math.isqrt(places) ** 2 == places


def _bicubic(table: Tensor, places: int) -> Tensor:
    """[n * n, C] -> [places, C]."""
    before, after = math.isqrt(len(table)), math.isqrt(places)
    grid = table.T.reshape(1, -1, before, before)
    return torch.nn.functional.interpolate(grid, size=(after, after), mode="bicubic").flatten(2)[0].T.contiguous()
