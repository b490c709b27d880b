"""Kernels fused from products and norms: rows of all channels stay on the chip (`parts`)."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, find_token
from swin_quant.backends.cuda.kernels.jit.gemm import finished, gelu
from swin_quant.backends.cuda.kernels.jit.parts import accumulated, finish_rows, product, read_normed, zeros


@triton.jit
def norm_gemm(
    x, norm_weight, norm_bias, w, scale, bias, out, levels, lengths, rows_in_all, eps, input_levels,
    N: tl.constexpr, K: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HEAD: tl.constexpr,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(norm(x) w^T): a program normalises and rounds BM rows once, for GROUP tiles of BN columns."""
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


@triton.jit
def gemm_norm(
    a, w, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, rows_in_all, eps, levels,
    N: tl.constexpr, K: tl.constexpr, POST: tl.constexpr,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The last product of a branch, its residual and a norm: a program has BM rows with all N columns."""
    SUM: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    a_places = a + tl.minimum(rows, rows_in_all - 1)[:, None] * K + k[None, :]
    w_places = w + tl.arange(0, BN)[:, None] * K + k[None, :]
    sums = zeros(N // BN, BM, BN, SUM)
    for start in range(0, K, BK):
        sums = accumulated(sums, tl.load(a_places + start), w_places + start, K, BN, SUM)
    finish_rows(
        sums, rows, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, rows_in_all, eps, levels,
        POST, SIDE, WINDOW, SHIFT, BM, BN,
    )  # fmt: skip


@triton.jit
def mlp(
    a, w1, scale1, bias1, w, scale, bias, residual, out, norm_weight, norm_bias, rows_in_all, eps, hidden_levels,
    C: tl.constexpr, HIDDEN: tl.constexpr, POST: tl.constexpr, SIDE: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fc1, GELU and fc2: a program has BM rows, and computes, rounds and multiplies BH hidden channels at a time."""
    OPERAND: tl.constexpr = a.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if OPERAND == tl.int8 else tl.float32
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    h = tl.arange(0, BH)
    a_places = a + tl.minimum(rows, rows_in_all - 1)[:, None] * C + c[None, :]
    tokens = ()
    for i in tl.static_range(C // BC):
        tokens = tokens + (tl.load(a_places + i * BC),)
    w1_places = w1 + h[:, None] * C + c[None, :]
    w_places = w + c[:, None] * HIDDEN + h[None, :]
    sums = zeros(C // BC, BM, BC, SUM)
    for start in range(0, HIDDEN, BH):
        y = product(tokens, w1_places + start * C, BM, BH, BC, SUM).to(tl.float32)
        if scale1 is not None:
            y = y * tl.load(scale1 + start + h)[None, :]
        y = gelu(y + tl.load(bias1 + start + h).to(tl.float32)[None, :], hidden_levels, OPERAND)
        sums = accumulated(sums, as_type(y, OPERAND), w_places + start, HIDDEN, BC, SUM)
    finish_rows(
        sums, rows, scale, bias, residual, out, norm_weight, norm_bias, None, rows_in_all, eps, None,
        POST, SIDE, SIDE, 0, BM, BC,
    )  # fmt: skip
