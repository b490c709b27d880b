"""The part of a result that one program computes: a tuner's choice, or the defaults below."""

from dataclasses import dataclass

import torch

from swin_quant.base.errors import SwinQuantError

FILLED = 128  # programs; fewer leave a large GPU idle, so smaller tiles are taken
REGISTERS = 8192  # float32 values that a program of row kernels holds
WARP_SUMS = 32 * 128  # the most float32 sums of a warp, beside their operands
LINE = 128  # bytes of a cache line
LEAST_STEP = 32  # bytes along K of one tensor core instruction
SEVERAL_WINDOWS = 8  # the most windows that a program of attention takes one after another
WIDE = 384  # the most channels, or bytes of channels, of which 64 rows fit on the chip


@dataclass(frozen=True)
class Tiles:
    """`rows` and `columns` of the result; `inner`: a step along K. 0 if a kernel has no such choice.

    In attention `rows` are queries, `columns` keys, and `windows` the number that a program takes one after another.
    """

    rows: int
    columns: int = 0
    inner: int = 0
    warps: int = 4
    stages: int = 1
    windows: int = 1

    def holding(self, **least: int) -> "Tiles":
        """These tiles. SwinQuantError for a side smaller than what the kernel needs in one tile."""
        for side, need in least.items():
            if (have := getattr(self, side)) < need:
                raise SwinQuantError(f"{side} {have}: {need} at least")
        return self

    def dividing(self, **whole: int) -> "Tiles":
        """These tiles. SwinQuantError for a side that does not divide a size that the kernel takes in whole tiles: it
        would skip columns, or read past a row."""
        for side, size in whole.items():
            if not (have := getattr(self, side)) or size % have:
                raise SwinQuantError(f"{side} {have}: {size} must be whole tiles")
        return self


def round_up_to_power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()


def least_step(itemsize: int) -> int:
    """The least `inner` of a kernel whose elements have `itemsize` bytes."""
    return max(16, LEAST_STEP // itemsize)


def gemm_tiles(m: int, n: int, k: int, itemsize: int, longest: int = LINE) -> Tiles:
    """For a [m, k] and w [n, k] of elements of `itemsize` bytes; `longest`: the most bytes of a step along K."""
    columns = next(side for side in (128, 64, 32) if side == 32 or 3 * -(-n // side) * side <= 4 * n)
    steps = [max(size // itemsize, least_step(itemsize)) for size in (LINE, 64, LEAST_STEP) if size <= longest]
    inner = next((step for step in steps if k % step == 0), steps[-1])
    # float32 products, as of the head, have no tensor core: each thread multiplies, one value after another.
    least = 32 if itemsize < 4 else 16
    rows = 128
    while rows > least and -(-m // rows) * -(-n // columns) < FILLED:
        rows //= 2
    while columns > least and -(-m // rows) * -(-n // columns) < FILLED:
        columns //= 2
    return Tiles(rows, columns, inner, warps=8 if rows * columns >= 128 * 128 else 4, stages=3)


def row_tiles(channels: int) -> Tiles:
    """For kernels that read whole rows."""
    block = round_up_to_power_of_two(channels)
    return Tiles(max(1, min(32, REGISTERS // 2 // block)), block, warps=4 if block <= 2048 else 8)


def pool_tiles(channels: int, tokens: int) -> Tiles:
    """For a program that takes all tokens of a picture, `rows` at a time.

    There are few programs, and their steps wait for each other: each has as many tokens as registers allow. More warps
    would only exchange more sums of rows.
    """
    block = round_up_to_power_of_two(channels)
    return Tiles(max(1, min(round_up_to_power_of_two(tokens), 2 * REGISTERS // block)), block, warps=8)


def attention_tiles(tokens: int, head_dim: int, pictures: int = 1, programs: int = 1) -> Tiles:
    """For windows of `tokens`; `programs`: one for each window and head.

    A window of one tile shares what is added to its logits with the windows of other pictures at its place: a program
    takes up to 8 of them, as long as a large GPU has three programs a multiprocessor.
    """
    if tokens <= 64:
        side = max(32, round_up_to_power_of_two(tokens))
        most = min(SEVERAL_WINDOWS, pictures, programs // (3 * FILLED))
        windows = 1 << max(most, 1).bit_length() - 1
        return Tiles(side, side, head_dim, warps=4 if side == 64 else 2, windows=windows)
    return Tiles(64, 64 if tokens % 64 == 0 else 32, head_dim, warps=4, stages=2)


def attention_norm_tiles(tokens: int, n: int) -> Tiles:
    """For a program that has all heads and all n columns of the projection, `inner` columns at a time.

    The sums stay in registers beside a head's logits: with more than 64 a thread, kernels spill on some GPU. Where n is
    too large for that, 8 warps have 32 rows. A window of several tiles of keys has tiles of 32 keys and up to 128 sums
    a thread: more warps would share the 32 channels of a head.
    """
    apart = attention_tiles(tokens, 0)
    rows = min(apart.rows, 64 if 64 * n <= REGISTERS else 32)
    inner = part_columns(n, rows)
    if tokens > apart.columns:
        warps = max(rows // 16, round_up_to_power_of_two(-(-rows * n // WARP_SUMS)))
        return Tiles(rows, 32, inner, min(warps, own_warps(rows, inner)), apart.stages)
    warps = min(4 if rows * n <= REGISTERS else 8, own_warps(rows, inner))
    return Tiles(rows, apart.columns, inner, warps)


def part_columns(n: int, rows: int) -> int:
    """Columns of n that `attention_norm` multiplies at a time: more than rows, as `own_warps` requires."""
    return _divisor(n, 2 * rows)


def own_warps(rows: int, columns: int) -> int:
    """The most warps that each have their own part of such a tile, in a product that feeds another or shares its rows.

    Triton divides rows alone among warps there, or columns alone if these are more: with more warps, several compute
    the same part. A warp has 16 rows, or 8 columns.
    """
    return columns // 8 if columns > rows else rows // 16


def patch_tiles(channels: int, taps: int) -> Tiles:
    """For a patch embedding with weight [channels, taps]."""
    block = round_up_to_power_of_two(channels)
    return Tiles(max(16, min(64, REGISTERS // block)), block, max(16, round_up_to_power_of_two(taps)))


def norm_gemm_tiles(m: int, n: int, k: int, itemsize: int, normed: bool = True, piece: int = 0) -> Tiles:
    """For a norm over k channels (if `normed`; V2 has none) and w [n, k]: rows stay on the chip in steps of `inner`,
    beside a tile of w. `piece`: contiguous channels of a gathered row; 0 for the whole row."""
    # Normalised rows stay on the chip beside the values that normalise them: with more than 128 values a thread kernels
    # spill, and 64 rows cannot have 8 warps (`own_warps`).
    rows = 64 if k * itemsize <= WIDE and not (normed and 64 * k > 2 * REGISTERS) else 32
    # Wide rows take tiles of 16 rows, with more threads. Half-precision rows, twice as long, need them at fewer
    # channels, and longer steps: with shorter ones rows of 1536 channels spill on 10.0.
    wide = normed and rows * k > (4 if itemsize == 1 else 3) * REGISTERS
    rows = _fewer(m, 16 if wide or rows * k * itemsize > 8 * REGISTERS else rows)
    inner = _divisor(piece or k, 128 if wide else 128 // itemsize)
    columns = 128 if n % 128 == 0 and k * itemsize <= 256 else 64 if n % 64 == 0 else 32
    if columns == 64 and itemsize > 1 and inner == 32 and not normed:  # steps this short spill on 10.0
        columns = 32
    warps = 8 if normed and rows * k > (2 * REGISTERS if rows > 16 else REGISTERS) else 4
    warps = min(warps, own_warps(rows, columns))
    return Tiles(rows, columns, inner, warps, stages=2 if k * itemsize <= WIDE else 1)


def column_groups(m: int, n: int, rows: int, columns: int) -> int:
    """The number of programs, with equal shares of w's tiles, where rows alone give too few programs."""
    tiles = -(-n // columns)
    wanted = -(-FILLED // -(-m // rows))
    return next((groups for groups in range(1, tiles) if groups >= wanted and tiles % groups == 0), tiles)


def gemm_norm_tiles(m: int, n: int, k: int, itemsize: int) -> Tiles:
    """For a program that has all n columns of its rows, with sums in parts of `columns`."""
    columns = _divisor(n, 128)
    # With V2's norm, 4 warps with 64 rows of 192 sums spill, and 8 warps would not each have their own part.
    rows = _fewer(m, 64 if n <= WIDE and (64 * n <= REGISTERS or own_warps(64, columns) >= 8) else 32)
    inner = (128 if n <= WIDE else 64) // itemsize
    warps = min(4 if rows * n <= REGISTERS else 8, own_warps(rows, columns))
    return Tiles(rows, columns, _divisor(k, inner), warps, stages=2)


def mlp_tiles(m: int, c: int, hidden: int, operand: torch.dtype, normed: bool = False) -> Tiles:
    """For a whole MLP of c channels: `inner` hidden channels at a time, tokens and sums in parts of `columns`.

    Four warps; 64 rows of 384 channels do not fit them, nor 64 of 256 in half precision. For 384 channels in half
    precision the next weights are not fetched ahead: they do not fit beside the current ones on GPUs with 99 KB a
    program. 64 rows of 256 channels in float8 spill on 9.0 with parts of 64 and, with V2's norm (`normed`), on 10.0
    with any.
    """
    itemsize = operand.itemsize
    wide_float8 = operand == torch.float8_e4m3fn and c > WIDE // 2
    most = 64 if c < WIDE and c * itemsize <= WIDE and not (wide_float8 and normed) else 32
    rows, columns = _fewer(m, most), _divisor(c, 32 if wide_float8 and most == 64 else 64)
    inner = _divisor(hidden, 64 if c * itemsize <= WIDE // 2 or most < 64 or (rows < 64 and itemsize == 1) else 32)
    warps = min(4, own_warps(rows, inner), own_warps(rows, columns))
    return Tiles(rows, columns, inner, warps, stages=2 if c * itemsize < 2 * WIDE else 1)


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`, a multiple of 32: no step runs past the last
    column."""
    return min(size & -size, most)


def _fewer(m: int, rows: int) -> int:
    """Rows of a tile, reduced while there are too few programs, down to what a tensor core takes."""
    while rows > 16 and -(-m // rows) < FILLED // 2:
        rows //= 2
    return rows
