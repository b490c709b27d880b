"""fc1, GELU and fc2: a program has BM rows, and computes, rounds and multiplies BH hidden channels at a time."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type
from swin_quant.backends.cuda.kernels.jit.epilogue import gelu
from swin_quant.backends.cuda.kernels.jit.parts import accumulated, finish_rows, product, zeros


@triton.jit
def mlp(
    a, w1, scale1, bias1, w, scale, bias, residual, out, norm_weight, norm_bias, rows_in_all, eps, hidden_levels,
    C: tl.constexpr, HIDDEN: tl.constexpr, POST: tl.constexpr, SIDE: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
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
