"""Pack masks and relative position biases for the fused attention kernels (docs/reference, section 3.6).

A kernel's threads read fragments of the logits on tensor cores: row r of the packed form holds, for each of 32 lanes,
two neighbouring columns of the S x S matrix. The padding from L x L to S x S is -30000, which a softmax turns into
zero.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from swin_quant.base.errors import SwinQuantError

PADDING = -30000.0
LARGEST = 256
_WARPS = {64: (2, 2), 128: (2, 2), 256: (1, 4), 384: (1, 8)}  # side -> warps along rows, along columns


def padded_side(tokens: int, int8: bool) -> int:
    """The side S for windows of `tokens`: 64 or 256 in INT8, 64, 128 or 256 in float.

    (For 65 to 128 tokens, FasterTransformer's own INT8 exporter fills the 256 in the order of 128; this one does not.)
    """
    sides = (64, 256) if int8 else (64, 128, 256)
    return next(side for side in sides if tokens <= side)


def pack(mask: Tensor, side: int) -> Tensor:
    """[B, L, L] -> [B, S, S] in the kernels' order."""
    room = side - mask.shape[-1]
    flat = pad(mask, (0, room, 0, room), value=PADDING).flatten(1)
    return flat[:, _order(side)].view(-1, side, side)


def unpack(packed: Tensor, tokens: int) -> Tensor:
    """The inverse of `pack`: [B, S, S] -> [B, L, L]. SwinQuantError unless the rest is padding."""
    side = packed.shape[-1]
    flat = torch.empty_like(packed).flatten(1)
    flat[:, _order(side)] = packed.flatten(1)
    mask = flat.view_as(packed)
    if (mask[:, tokens:] != PADDING).any() or (mask[:, :, tokens:] != PADDING).any():
        raise SwinQuantError(f"a packed mask of {tokens} tokens is not padded with {PADDING:.0f}")
    return mask[:, :tokens, :tokens].contiguous()


def source(row: Tensor, lane: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Row and first column, in the S x S matrix, of the values in packed `row` (0 .. S * S / 64 - 1) at `lane` (0 ..
    31)."""
    along_rows, along_columns = _WARPS[side]
    across = -(-side // (16 * along_columns))
    warps = along_rows * along_columns
    warp, element = row // 4, 2 * (row % 4)
    tile_row, tile_column = warp // (across * warps), warp % (across * warps) // warps
    inside = warp % warps
    matrix_row = 16 * along_rows * tile_row + 16 * (inside % along_rows) + 8 * (element // 4) + lane // 4
    column = 16 * along_columns * tile_column + 16 * (inside // along_rows) + 8 * (element % 4 // 2) + 2 * (lane % 4)
    return matrix_row, column


@functools.cache
def _order(side: int) -> Tensor:
    """int64 [S * S]: the position of each packed value in the row-major matrix."""
    row, column = source(torch.arange(side * side // 64)[:, None], torch.arange(32)[None], side)
    first = row * side + column
    return torch.stack([first, first + 1], dim=-1).flatten()
