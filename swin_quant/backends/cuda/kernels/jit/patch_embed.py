"""Pictures to tokens: a program has ROWS patches with all C channels, so that the norm follows in registers."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, normed


@triton.jit
def patch_embed(
    images, weight, bias, norm_weight, norm_bias, positions, out, rows_in_all, eps, scale,
    C: tl.constexpr, SIDE: tl.constexpr, PATCH: tl.constexpr, IN: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    HALF_STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = IN * PATCH * PATCH
    PIXELS: tl.constexpr = SIDE * PATCH
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    channel, line, column = k // (PATCH * PATCH), k // PATCH % PATCH, k % PATCH
    picture, down, right = rows // (SIDE * SIDE), rows // SIDE % SIDE, rows % SIDE
    corner = down * PATCH * PIXELS + right * PATCH
    if CHANNELS_LAST:
        places = (picture * (PIXELS * PIXELS) + corner)[:, None] * IN
        places += ((line * PIXELS + column) * IN + channel)[None, :]
    else:
        places = (picture * (IN * PIXELS * PIXELS) + corner)[:, None]
        places += (channel * (PIXELS * PIXELS) + line * PIXELS + column)[None, :]
    a = tl.load(images + places, mask=(rows < rows_in_all)[:, None] & (k < K)[None, :], other=0)
    w = tl.load(weight + c[:, None] * K + k[None, :], mask=(c < C)[:, None] & (k < K)[None, :], other=0.0)
    y = tl.dot(a.to(w.dtype), tl.trans(w), out_dtype=tl.float32)
    b = tl.load(bias + c, mask=c < C, other=0.0)
    TYPE: tl.constexpr = out.dtype.element_ty
    if HALF_STEPS:
        y = (y.to(TYPE) + b.to(TYPE)[None, :]).to(tl.float32)
    else:
        y = y * scale + b.to(tl.float32)[None, :]
    if norm_weight is not None:
        y = normed(y, c, norm_weight, norm_bias, eps, C)
    valid = (rows < rows_in_all)[:, None] & (c < C)[None, :]
    if positions is not None:
        places = (rows % (SIDE * SIDE))[:, None] * C + c[None, :]
        y = y + tl.load(positions + places, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * C + c[None, :], as_type(y, TYPE), mask=valid)
