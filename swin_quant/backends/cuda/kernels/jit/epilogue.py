"""The epilogue of a tile of BN columns after sums, scales and biases: GELU, unit vectors, levels."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import exp2, rounded

SMALLEST_NORM = tl.constexpr(1e-12)


@triton.jit
def gelu(y, TYPE: tl.constexpr):
    """y * Phi(y) = max(y, 0) - |y| * Phi(-|y|), with log2(Phi(-z)) as a polynomial, for a result of TYPE. By erf, which
    branches, it takes 45 instructions.

    8 instructions for float types: within 2.8e-7 * max(1, |y|) of erf's GELU. 6 for int8: within 5.5e-5, and a level is
    one of 127 of the largest value (tests/backends/cuda/kernels/test_rounding.py). Coefficients: the least largest
    error of the result. Each polynomial falls for every z > 0, so that beyond its fit the power is 0.
    """
    z = tl.abs(y)
    if TYPE == tl.int8:
        power = -2.4885463e-02 * z - 4.9882051e-01
        power = power * z - 1.1292455e00
        power = power * z - 1.0035318e00
    else:
        power = -4.9841497e-04 * z + 7.2495737e-03
        power = power * z - 5.2209754e-02
        power = power * z - 4.5961338e-01
        power = power * z - 1.1509415e00
        power = power * z - 1.0000187e00
    return tl.maximum(y, 0.0) - z * exp2(power)


@triton.jit
def finished(
    y, first, levels, lengths, before, unit_epsilon,
    N: tl.constexpr, KIND: tl.constexpr, HEAD: tl.constexpr, ONE_LEVEL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """y float32 [BM, BN], of the columns from `first` on, ready to be rounded to TYPE, the result's."""
    columns = first + tl.arange(0, BN)
    if KIND == "gelu":
        y = gelu(y, TYPE)
    if KIND == "unit":
        y = _unit(y, first, lengths, before, unit_epsilon, N, HEAD, BM, BN)
    if levels is not None:
        y = y * levels if ONE_LEVEL else y * tl.load(levels + columns, mask=columns < N, other=0.0)[None, :]
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
