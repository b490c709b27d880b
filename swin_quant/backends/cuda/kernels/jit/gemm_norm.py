"""The last product of a branch, its residual and a norm: a program has BM rows with all N columns."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.parts import accumulated, finish_rows, zeros


@triton.jit
def gemm_norm(
    a, w, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, rows_in_all, eps, levels,
    N: tl.constexpr, K: tl.constexpr, POST: tl.constexpr,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
