"""The two tile layouts of int8 weights for cuBLASLt.

See docs/reference, section 3.3. Each layout belongs to a generation of GPUs: loading does not reorder it, and a
mismatch computes garbage without an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from swin_quant.base.errors import UsageError

TILE = 32
Offsets = Callable[[int, int], Tensor]


def col32_2r_4r4(outputs: int, inputs: int) -> Tensor:
    """Byte offset of each weight [output, input] for GPUs of compute capability 8.0 and above, int64."""
    r, c = _grid(outputs, inputs)
    t = r % 32
    row = 2 * (4 * (t % 8 // 2) + t // 8) + t % 2
    return c // 32 * 32 * outputs + r // 32 * 1024 + 32 * row + c % 32


def col4_4r2_8c(outputs: int, inputs: int) -> Tensor:
    """Byte offset of each weight [output, input] for GPUs of compute capability 7.5, int64."""
    r, c = _grid(outputs, inputs)
    line = 8 * (r // 8) + 4 * (r % 2) + c % 32 // 8
    quad = 4 * (c % 8 // 4) + r % 8 // 2
    return c // 32 * 32 * outputs + 32 * line + 4 * quad + c % 4


def _grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(columns)[None]


WEIGHT_LAYOUTS: dict[str, Offsets] = {"COL32_2R_4R4": col32_2r_4r4, "COL4_4R2_8C": col4_4r2_8c}


def weight_layout(sm: int) -> str:
    """The layout that a GPU of this compute capability (80 for 8.0) reads."""
    return "COL32_2R_4R4" if sm >= 80 else "COL4_4R2_8C"


def scatter(matrix: Tensor, offsets: Offsets) -> Tensor:
    """[rows, columns] -> [rows * columns] in a layout. UsageError unless the tiles are whole."""
    rows, columns = matrix.shape
    if rows % TILE or columns % TILE:
        raise UsageError(f"a matrix of {rows} x {columns} is not made of {TILE} x {TILE} tiles, as int8 GEMMs need")
    stored = torch.empty_like(matrix).view(-1)
    stored[offsets(rows, columns).view(-1)] = matrix.reshape(-1)
    return stored


def gather(stored: Tensor, rows: int, columns: int, offsets: Offsets) -> Tensor:
    """The inverse of `scatter`."""
    return stored[offsets(rows, columns)]


def quantize_weight(weight: Tensor, amax: float) -> Tensor:
    """int8 [n, k] of a float weight: rounded to float16, times 127 / amax in double, rounded half to even,
    saturated."""
    levels = (weight.half().double() * 127 / amax).float().round()
    return levels.clamp(-128, 127).to(torch.int8)


def interleave_heads(qkv: Tensor, heads: int) -> Tensor:
    """Rows (q | k | v, head, dim) of [3C, ...] -> (head, q | k | v, dim), as the float op reads them (section 3.7)."""
    return qkv.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def separate_heads(qkv: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave_heads`."""
    return qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
