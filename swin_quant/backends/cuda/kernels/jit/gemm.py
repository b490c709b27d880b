"""The product, and its epilogue after sums, scales and biases: GELU, unit vectors, levels."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, exp2, find_token, rounded

SMALLEST_NORM = tl.constexpr(1e-12)
LEAST_LEVELS = tl.constexpr(1e-12)  # the cube of a larger step would overflow


@triton.jit
def gelu(y, levels, TYPE: tl.constexpr):
    """levels * GELU(y / levels) for a result of TYPE; levels None is 1, and 0, of a range without values, gives 0.

    GELU(x) = x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), with log2(Phi(-z)) as a polynomial; by erf, which branches, it
    takes 45 instructions. The polynomial for int8 takes z in levels, its coefficients divided by powers of them.

    8 instructions for float types: within 2.8e-7 * max(1, |y|) of erf's GELU. 6 for int8: within 5.5e-5, and a level is
    one of 127 of the largest value (tests/backends/cuda/kernels/test_rounding.py). Coefficients: the least largest
    error of the result. Each polynomial falls for every z > 0, so that beyond its fit the power is 0.
    """
    z = tl.abs(y)
    step = 1.0
    if levels is not None:
        step = 1.0 / tl.maximum(levels, LEAST_LEVELS)
    if TYPE == tl.int8:
        power = (-2.4885463e-02 * step * step * step) * z - 4.9882051e-01 * step * step
        power = power * z - 1.1292455e00 * step
        power = power * z - 1.0035318e00
    else:
        x = z if levels is None else z * step
        power = -4.9841497e-04 * x + 7.2495737e-03
        power = power * x - 5.2209754e-02
        power = power * x - 4.5961338e-01
        power = power * x - 1.1509415e00
        power = power * x - 1.0000187e00
    return tl.maximum(y, 0.0) - z * exp2(power)


@triton.jit
def finished(
    y, first, levels, lengths, before, unit_epsilon,
    N: tl.constexpr, KIND: tl.constexpr, HEAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """y float32 [BM, BN], of the columns from `first` on, ready to be rounded to TYPE, the result's."""
    columns = first + tl.arange(0, BN)
    if KIND == "gelu":
        y = gelu(y, levels, TYPE)
    else:
        if KIND == "unit":
            y = _unit(y, first, lengths, before, unit_epsilon, N, HEAD, BM, BN)
        if levels is not None:
            y = y * tl.load(levels + columns, mask=columns < N, other=0.0)[None, :]
    return y


@triton.jit
def _unit(
    y, first, lengths, before, epsilon,
    N: tl.constexpr, HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q and k scaled to unit length, times lengths; v unchanged."""
    HEADS: tl.constexpr = BN // HEAD
    columns = first + tl.arange(0, BN)
    in_columns = columns < N
    normalised = (columns < N // 3 * 2)[None, :]
    x = y
    if before is not None:
        x = rounded(y * tl.load(before + columns, mask=in_columns, other=0.0)[None, :])
        x = x * tl.load(before + N + columns, mask=in_columns, other=0.0)[None, :]
    heads = tl.reshape(x, [BM, HEADS, HEAD])
    squares = tl.sum(heads * heads, 2)
    starts = first + tl.arange(0, HEADS) * HEAD
    factor = tl.load(lengths + starts, mask=starts < N, other=0.0)[None, :]
    if epsilon is not None:
        factor = tl.rsqrt(squares + epsilon) * factor
    else:
        factor = factor / tl.maximum(tl.sqrt(squares), SMALLEST_NORM)
    return tl.where(normalised, tl.reshape(heads * factor[:, :, None], [BM, BN]), y)


@triton.jit
def gemm(
    a, w, scale, bias, out, residual, levels, lengths, before, table, rows_in_all, product_levels, unit_epsilon,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, PRODUCT_ROUNDS: tl.constexpr, HALF_STEPS: tl.constexpr,
    HEAD: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = epilogue(a w^T) in tiles of BM x BN, with K in steps of BK. Both operands are contiguous along K, as s8
    wgmma requires."""
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
