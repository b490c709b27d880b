"""out = epilogue(a w^T) in tiles of BM x BN, with K in steps of BK. Both operands are contiguous along K, as s8 wgmma
requires."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, find_token, rounded
from swin_quant.backends.cuda.kernels.jit.epilogue import finished


@triton.jit
def gemm(
    a, w, scale, bias, out, residual, levels, lengths, before, table, rows_in_all, product_levels, unit_epsilon,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, PRODUCT_ROUNDS: tl.constexpr, HALF_STEPS: tl.constexpr,
    HEAD: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    # Neighbouring programs read the same rows of a, the longer matrix; w stays in the cache anyway.
    rows = tl.program_id(0) // COLUMNS * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % COLUMNS * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns past the edges read the last one, and are not stored.
    a_places = a + tl.minimum(rows, rows_in_all - 1)[:, None] * K + k[None, :]
    w_places = w + tl.minimum(columns, N - 1)[:, None] * K + k[None, :]
    SUM: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    # Hopper's tensor cores keep 14 bits of a sum of float8 products: add up in float32 after each step.
    STEP: tl.constexpr = BK if a.dtype.element_ty == tl.float8e4nv else None
    sums = tl.zeros([BM, BN], SUM)
    for start in range(0, K, BK):
        if K % BK == 0:
            x, y = tl.load(a_places), tl.load(w_places)
        else:
            inside = (k < K - start)[None, :]
            x, y = tl.load(a_places, mask=inside, other=0.0), tl.load(w_places, mask=inside, other=0.0)
        sums = tl.dot(x, tl.trans(y), sums, out_dtype=SUM, input_precision="ieee", max_num_imprecise_acc=STEP)
        a_places += BK
        w_places += BK

    y = sums.to(tl.float32)
    in_columns = columns < N
    valid = (rows < rows_in_all)[:, None] & in_columns[None, :]
    TYPE: tl.constexpr = out.dtype.element_ty
    if product_levels is not None:
        y = y * product_levels
        if PRODUCT_ROUNDS:
            y = rounded(y)
    if KIND == "table":
        result = tl.load(table + columns[None, :] * 256 + (y.to(tl.int32) + 128), mask=valid, other=0.0)
        tl.store(out + rows[:, None] * N + columns[None, :], result, mask=valid)
    else:
        if scale is not None:
            y = y * tl.load(scale + columns, mask=in_columns, other=0.0)[None, :]
        places = rows[:, None] * N + columns[None, :]
        if KIND == "residual":
            places = find_token(rows, SIDE, WINDOW, SHIFT)[:, None] * N + columns[None, :]
        if HALF_STEPS:
            y = y.to(TYPE)
            if KIND == "residual":
                y = tl.load(residual + places, mask=valid, other=0.0) + y
            if bias is not None:
                y = y + tl.load(bias + columns, mask=in_columns, other=0.0).to(TYPE)[None, :]
            y = y.to(tl.float32)
        else:
            if bias is not None:
                y = y + tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
            if KIND == "residual":
                y = y + tl.load(residual + places, mask=valid, other=0.0).to(tl.float32)
        y = finished(
            y, tl.program_id(0) % COLUMNS * BN, levels, lengths, before, unit_epsilon,
            N, KIND, HEAD, BM, BN, TYPE,
        )  # fmt: skip
        tl.store(out + places, as_type(y, TYPE), mask=valid)
