"""out = epilogue(norm(x) w^T): a program normalises and rounds BM rows once, for GROUP tiles of BN columns."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, find_token
from swin_quant.backends.cuda.kernels.jit.epilogue import finished
from swin_quant.backends.cuda.kernels.jit.parts import product, read_normed


@triton.jit
def norm_gemm(
    x, norm_weight, norm_bias, w, scale, bias, out, levels, lengths, rows_in_all, eps, input_levels,
    N: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HEAD: tl.constexpr,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    GROUPS: tl.constexpr = COLUMNS // GROUP
    OPERAND: tl.constexpr = w.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if OPERAND == tl.int8 else tl.float32
    rows = tl.program_id(0) // GROUPS * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    # Rows past the end read the last one, and are not stored.
    tokens = find_token(tl.minimum(rows, rows_in_all - 1), SIDE, WINDOW, SHIFT)
    if K > PIECE:  # the first of four neighbours: even line and column on the larger map
        tokens = (tokens // SIDE * (2 * SIDE) + tokens % SIDE) * 2
    a = read_normed(
        x + tokens[:, None] * PIECE + k[None, :], norm_weight, norm_bias, eps, input_levels,
        K, PIECE, 2 * SIDE, BM, BK, OPERAND,
    )  # fmt: skip
    start = tl.program_id(0) % GROUPS * (GROUP * BN)
    for tile in range(GROUP):
        first = start + tile * BN
        columns = first + tl.arange(0, BN)
        in_columns = columns < N
        y = product(a, w + tl.minimum(columns, N - 1)[:, None] * K + k[None, :], BM, BN, BK, SUM).to(tl.float32)
        if scale is not None:
            y = y * tl.load(scale + columns, mask=in_columns, other=0.0)[None, :]
        if bias is not None:
            y = y + tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        y = finished(y, first, levels, lengths, None, None, N, KIND, HEAD, BM, BN, out.dtype.element_ty)
        valid = (rows < rows_in_all)[:, None] & in_columns[None, :]
        tl.store(out + rows[:, None] * N + columns[None, :], as_type(y, out.dtype.element_ty), mask=valid)
