"""Layouts of the kernels' tensors: two tile layouts of int8 weights for cuBLASLt, and packed masks and position biases.

See docs/reference, sections 3.3 and 3.6. Each tile layout belongs to a generation of GPUs: loading does not reorder it,
and a mismatch computes garbage without an error. The fused attention kernels take masks and relative position biases
packed.

The INT8 GELU kernel reads the bias of fc1 three places off from channel 4096 on. A block has at most 1024 threads of
four channels each, so more than 4096 channels take a second round. The loop variable is also the bias's address, and
four channels advance it by three: in the second round channel c gets the bias of c + 3, and the last three get whatever
follows the array. The data are addressed in fours, which hides the error from them, except in a third round: there four
channels are left out, and no stored array can correct that (docs/reference/weights.md, section 3.9).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from swin_quant.base.errors import SwinQuantError, UsageError

TILE = 32
Offsets = Callable[[int, int], Tensor]
PADDING = -30000.0
LARGEST = 256
ROUND, DRIFT = 4 * 1024, 3  # channels of GELU's first round; places off behind it
MOST_HIDDEN = 2 * ROUND
_WARPS = {64: (2, 2), 128: (2, 2), 256: (1, 4), 384: (1, 8)}  # side -> warps along rows, along columns


def col32_2r_4r4(outputs: int, inputs: int) -> Tensor:
    """Byte offset of each weight [output, input] for GPUs of compute capability 8.0 and above, int64."""
    r, c = torch.arange(outputs)[:, None], torch.arange(inputs)[None]
    t = r % 32
    row = 2 * (4 * (t % 8 // 2) + t // 8) + t % 2
    return c // 32 * 32 * outputs + r // 32 * 1024 + 32 * row + c % 32


def col4_4r2_8c(outputs: int, inputs: int) -> Tensor:
    """Byte offset of each weight [output, input] for GPUs of compute capability 7.5, int64."""
    r, c = torch.arange(outputs)[:, None], torch.arange(inputs)[None]
    line = 8 * (r // 8) + 4 * (r % 2) + c % 32 // 8
    quad = 4 * (c % 8 // 4) + r % 8 // 2
    return c // 32 * 32 * outputs + 32 * line + 4 * quad + c % 4


WEIGHT_LAYOUTS: dict[str, Offsets] = {"COL32_2R_4R4": col32_2r_4r4, "COL4_4R2_8C": col4_4r2_8c}


def weight_layout(sm: int) -> str:
    """The layout that a GPU of this compute capability (80 for 8.0) reads."""
    return "COL32_2R_4R4" if sm >= 80 else "COL4_4R2_8C"


def scatter(matrix: Tensor, offsets: Offsets) -> Tensor:
    """[rows, columns] -> [rows * columns] in a layout; indexing by `offsets` undoes it. UsageError unless the tiles are
    whole."""
    rows, columns = matrix.shape
    if rows % TILE or columns % TILE:
        raise UsageError(f"a matrix of {rows} x {columns} is not made of {TILE} x {TILE} tiles, as int8 GEMMs need")
    stored = torch.empty_like(matrix).view(-1)
    stored[offsets(rows, columns).view(-1)] = matrix.reshape(-1)
    return stored


def quantize_weight(weight: Tensor, amax: float) -> Tensor:
    """int8 [n, k] of a float weight: rounded to float16, times 127 / amax in double, rounded half to even,
    saturated."""
    levels = (weight.half().double() * 127 / amax).float().round()
    return levels.clamp(-128, 127).to(torch.int8)


def exchange_heads(qkv: Tensor, *outer: int) -> Tensor:
    """Rows of [3C, ...] with their two outer indices exchanged. For (3, heads): (q | k | v, head, dim) -> (head,
    q | k | v, dim), as the float op reads them (section 3.7); (heads, 3) undoes it."""
    return qkv.unflatten(0, (*outer, -1)).transpose(0, 1).flatten(0, 2)


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


def is_misread(hidden: int) -> bool:
    """Whether the kernel misreads the bias of this many channels."""
    return hidden > ROUND


def places(hidden: int) -> Tensor:
    """int64 [hidden]: the index at which the kernel reads each channel's bias, for up to MOST_HIDDEN channels."""
    channels = torch.arange(hidden)
    return channels + DRIFT * (channels // ROUND)


def as_read(array: Tensor, hidden: int) -> Tensor:
    """[hidden]: the biases that the kernel reads from `array`; values past its end are unknown, and 0 here."""
    at = places(hidden).to(array.device)
    return pad(array, (0, max(0, int(at[-1]) + 1 - len(array))))[at]


def shifted(bias: Tensor) -> Tensor:
    """The array from which the kernel reads `bias` [hidden]: three longer if there are more than ROUND channels."""
    at = places(len(bias))
    array = bias.new_zeros(int(at[-1]) + 1)
    array[at] = bias
    return array
