"""Kernels that read whole rows: each program has ROWS rows, in BLOCK >= C columns."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, find_token, normed


@triton.jit
def norm_quantize(
    x, weight, bias, out, rows_in_all, eps, levels,
    C: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    valid = (rows < rows_in_all)[:, None] & (c < C)[None, :]
    tokens = find_token(rows, SIDE, WINDOW, SHIFT)
    y = tl.load(x + tokens[:, None] * C + c[None, :], mask=valid, other=0.0).to(tl.float32)
    if weight is not None:
        y = normed(y, c, weight, bias, eps, C)
    if levels is not None:
        y = y * levels
    tl.store(out + rows[:, None] * C + c[None, :], as_type(y, out.dtype.element_ty), mask=valid)


@triton.jit
def merge_quantize(
    x, weight, bias, out, rows_in_all, eps, levels,
    C: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIDE // 2
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    valid = (rows < rows_in_all)[:, None] & (c < 4 * C)[None, :]
    piece = c // C
    first = (rows // HALF * SIDE + rows % HALF) * 2  # the first of four neighbours: even line and column
    tokens = first[:, None] + (piece % 2 * SIDE + piece // 2)[None, :]
    y = tl.load(x + tokens * C + (c % C)[None, :], mask=valid, other=0.0).to(tl.float32)
    if weight is not None:
        y = normed(y, c, weight, bias, eps, 4 * C)
    if levels is not None:
        y = y * levels
    tl.store(out + rows[:, None] * (4 * C) + c[None, :], as_type(y, out.dtype.element_ty), mask=valid)


@triton.jit
def norm_residual(
    y, weight, bias, residual, out, out_quantized, rows_in_all, eps, levels,
    C: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    valid = (rows < rows_in_all)[:, None] & (c < C)[None, :]
    total = tl.load(y + rows[:, None] * C + c[None, :], mask=valid, other=0.0).to(tl.float32)
    total = normed(total, c, weight, bias, eps, C)
    places = find_token(rows, SIDE, WINDOW, SHIFT)[:, None] * C + c[None, :]
    if residual is not None:
        total = total + tl.load(residual + places, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + places, as_type(total, out.dtype.element_ty), mask=valid)
    if out_quantized is not None:
        if levels is not None:
            total = total * levels
        tl.store(out_quantized + places, as_type(total, out_quantized.dtype.element_ty), mask=valid)


@triton.jit
def pool(
    x, weight, bias, factors, out, eps,
    C: tl.constexpr, TOKENS: tl.constexpr, HALF_STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a picture."""
    c = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, TOKENS, ROWS):
        tokens = start + tl.arange(0, ROWS)
        valid = (tokens < TOKENS)[:, None] & (c < C)[None, :]
        places = (tl.program_id(0) * TOKENS + tokens)[:, None] * C + c[None, :]
        values = tl.load(x + places, mask=valid, other=0.0).to(tl.float32)
        if factors is not None:
            values *= tl.load(factors + c, mask=c < C, other=0.0)[None, :]
        if HALF_STEPS:
            y = normed(values, c, weight, bias, eps, C).to(x.dtype.element_ty).to(tl.float32)
            total += tl.sum(tl.where(valid, y, 0.0), 0)
        else:  # the norm's weight and bias are left to the mean
            y = tl.where((c < C)[None, :], values - (tl.sum(values, 1) / C)[:, None], 0.0)
            total += tl.sum(y * tl.rsqrt(tl.sum(y * y, 1) / C + eps)[:, None], 0)
    total = total / TOKENS
    if not HALF_STEPS:
        total = total * tl.load(weight + c, mask=c < C, other=0.0) + tl.load(bias + c, mask=c < C, other=0.0)
    tl.store(out + tl.program_id(0) * C + c, as_type(total, out.dtype.element_ty), mask=c < C)


@triton.jit
def patch_embed(
    images, weight, bias, norm_weight, norm_bias, positions, out, rows_in_all, eps, scale,
    C: tl.constexpr, SIDE: tl.constexpr, PATCH: tl.constexpr, IN: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    HALF_STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pictures to tokens: a program has ROWS patches with all C channels, so that the norm follows in registers."""
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
