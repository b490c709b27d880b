"""Whole rows on the chip, as a tuple of equally wide tiles: rows of 96 or 384 columns need no padding."""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_type, find_token


@triton.jit
def zeros(COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TYPE: tl.constexpr):
    """COUNT tiles [BM, BN]."""
    parts = ()
    for _ in tl.static_range(COUNT):
        parts = parts + (tl.zeros([BM, BN], TYPE),)
    return parts


@triton.jit
def accumulated(parts, a, w_places, K: tl.constexpr, BN: tl.constexpr, SUM: tl.constexpr):
    """parts + a w^T: a [BM, BK]; w_places [BN, BK] are addresses of the first part's weights, rows K apart."""
    # Hopper's tensor cores keep 14 bits of a sum of float8 products: add up in float32 after each step.
    STEP: tl.constexpr = a.shape[1] if a.dtype == tl.float8e4nv else None
    more = ()
    for i in tl.static_range(len(parts)):
        w = tl.load(w_places + i * BN * K)
        part = tl.dot(
            a, tl.trans(w), parts[i], out_dtype=SUM, input_precision="ieee", max_num_imprecise_acc=STEP
        )  # fmt: skip
        more = more + (part,)
    return more


@triton.jit
def product(parts, w_places, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SUM: tl.constexpr):
    """[BM, BN] over all columns of a, in parts [BM, BK]; w_places [BN, BK] are addresses of w's first columns."""
    sums = tl.zeros([BM, BN], SUM)
    STEP: tl.constexpr = BK if parts[0].dtype == tl.float8e4nv else None
    for i in tl.static_range(len(parts)):
        w = tl.load(w_places + i * BK)
        sums = tl.dot(parts[i], tl.trans(w), sums, out_dtype=SUM, input_precision="ieee", max_num_imprecise_acc=STEP)
    return sums


@triton.jit
def _part(i: tl.constexpr, PIECE: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr):
    """The offset of part i from the first part of a row. Rows of one PIECE are contiguous; rows of four gather
    neighbours on a map of SIDE, in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
    neighbour: tl.constexpr = i * BK // PIECE
    return (neighbour % 2 * SIDE + neighbour // 2) * PIECE + i * BK % PIECE


@triton.jit
def read_normed(
    x_places, weight, bias, eps, levels,
    C: tl.constexpr, PIECE: tl.constexpr, SIDE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rows of C channels, normalised, times `levels`, as TYPE; x_places [BM, BK] are addresses of their first parts,
    `_part` gives the offsets of the rest.

    Rows are read three times, for the mean, the variance and the result: they come from the caches and need no
    registers.
    """
    c = tl.arange(0, BK)
    mean = tl.zeros([BM], tl.float32)
    factor = tl.zeros([BM], tl.float32)
    if weight is not None:
        for i in tl.static_range(C // BK):
            mean += tl.sum(tl.load(x_places + _part(i, PIECE, SIDE, BK)).to(tl.float32), 1)
        mean = mean / C
        for i in tl.static_range(C // BK):
            y = tl.load(x_places + _part(i, PIECE, SIDE, BK)).to(tl.float32) - mean[:, None]
            factor += tl.sum(y * y, 1)
        factor = tl.rsqrt(factor / C + eps)
    parts = ()
    for i in tl.static_range(C // BK):
        y = tl.load(x_places + _part(i, PIECE, SIDE, BK)).to(tl.float32)
        if weight is not None:
            y = _scaled((y - mean[:, None]) * factor[:, None], i * BK + c, weight, bias)
        if levels is not None:
            y = y * levels
        parts = parts + (as_type(y, TYPE),)
    return parts


@triton.jit
def _scaled(y, columns, weight, bias):
    y = y * tl.load(weight + columns).to(tl.float32)[None, :]
    if bias is not None:
        y = y + tl.load(bias + columns).to(tl.float32)[None, :]
    return y


@triton.jit
def _normed(parts, weight, bias, eps, BM: tl.constexpr, BN: tl.constexpr):
    """LayerNorm over all columns of float32 parts."""
    c = tl.arange(0, BN)
    mean = tl.zeros([BM], tl.float32)
    for i in tl.static_range(len(parts)):
        mean += tl.sum(parts[i], 1)
    mean = mean / (len(parts) * BN)
    squares = tl.zeros([BM], tl.float32)
    for i in tl.static_range(len(parts)):
        y = parts[i] - mean[:, None]
        squares += tl.sum(y * y, 1)
    factor = tl.rsqrt(squares / (len(parts) * BN) + eps)
    normed = ()
    for i in tl.static_range(len(parts)):
        normed = normed + (_scaled((parts[i] - mean[:, None]) * factor[:, None], i * BN + c, weight, bias),)
    return normed


@triton.jit
def finish_rows(
    sums, rows, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, rows_in_all, eps, levels,
    POST: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The end of a branch: from the sums of its last product to the residual stream and the next product's input.

    The norm is over the stream, for the next product, or with POST over the branch (V2). Its input is first rounded to
    the stream's type, as if the norm were a kernel of its own.
    """
    N: tl.constexpr = len(sums) * BN
    TYPE: tl.constexpr = out.dtype.element_ty
    c = tl.arange(0, BN)
    valid = (rows < rows_in_all)[:, None]
    places = find_token(rows, SIDE, WINDOW, SHIFT)[:, None] * N + c[None, :]
    parts = ()
    for i in tl.static_range(len(sums)):
        y = sums[i].to(tl.float32)
        if scale is not None:
            y = y * tl.load(scale + i * BN + c)[None, :]
        if bias is not None:
            y = y + tl.load(bias + i * BN + c).to(tl.float32)[None, :]
        if not POST:
            y = y + tl.load(residual + places + i * BN, mask=valid, other=0.0).to(tl.float32)
            tl.store(out + places + i * BN, as_type(y, TYPE), mask=valid)
        parts = parts + (as_type(y, TYPE).to(tl.float32),)
    if norm_weight is not None:
        parts = _normed(parts, norm_weight, norm_bias, eps, BM, BN)
        for i in tl.static_range(len(sums)):
            y = parts[i]
            if POST:
                if residual is not None:
                    y = y + tl.load(residual + places + i * BN, mask=valid, other=0.0).to(tl.float32)
                tl.store(out + places + i * BN, as_type(y, TYPE), mask=valid)
            if out_quantized is not None:
                if levels is not None:
                    y = y * levels
                tl.store(out_quantized + places + i * BN, as_type(y, out_quantized.dtype.element_ty), mask=valid)
