"""Attention of BQ queries of one head in a window, over its keys in tiles of BKEYS; alone, and with the projection.

Alone, a program may take the windows of WINDOWS pictures at one place of the map, one after another: they share the
head's position bias and the shift's mask, which are made once if a window is one tile.

If a window is one tile, its logits are computed once. Otherwise int8 (or float8) probabilities take two passes over the
keys, for they need the whole sum before they are rounded; half ones take one, as in flash attention.
"""

import triton
import triton.language as tl

from swin_quant.backends.cuda.kernels.jit.arithmetic import as_half, as_type, exp2, reciprocal
from swin_quant.backends.cuda.kernels.jit.parts import accumulated, finish_rows, zeros

MASKED = tl.constexpr(-100.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounds(window, ACROSS: tl.constexpr):
    """Whether two regions of the map before the shift meet below each other (2) and side by side (1) in a window: in
    the last of ACROSS windows."""
    place = window % (ACROSS * ACROSS)
    return (place // ACROSS == ACROSS - 1).to(tl.int32) * 2 + (place % ACROSS == ACROSS - 1).to(tl.int32)


@triton.jit
def _sides(tokens, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """The side of such a bound on which a window's token is: 2 below, 1 on the right."""
    FIRST: tl.constexpr = WINDOW - SHIFT
    return (tokens >= FIRST * WINDOW).to(tl.int32) * 2 + (tokens % WINDOW >= FIRST).to(tl.int32)


@triton.jit
def _added(
    position_bias, queries, keys, window, head,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, BIAS_ROW: tl.constexpr,
):  # fmt: skip
    """float32 [BQ, BKEYS], added to the logits: position bias and the shift's mask."""
    L: tl.constexpr = WINDOW * WINDOW
    # Columns from L on are padding: a mask that ended at L would load each half of a window of 7 by itself.
    inside = (queries < L)[:, None] & (keys < BIAS_ROW)[None, :]
    places = (head * L + queries)[:, None] * BIAS_ROW + keys[None, :]
    added = tl.load(position_bias + places, mask=inside, other=0.0).to(tl.float32)
    if SHIFT > 0:
        bounds = _bounds(window, SIDE // WINDOW)
        differ = _sides(queries, WINDOW, SHIFT)[:, None] ^ _sides(keys, WINDOW, SHIFT)[None, :]
        added = tl.where((differ & bounds) == 0, added, added + MASKED)
    return added


@triton.jit
def _logits(
    qkv, position_bias, added, q, queries, keys, window, head, scale,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BIAS_ROW: tl.constexpr,
):  # fmt: skip
    """float32 [BQ, BKEYS]; -inf for keys after the last. `added`: `_added` of these keys, or None to make it."""
    L: tl.constexpr = WINDOW * WINDOW
    d = tl.arange(0, D)
    places = (window * L + keys)[:, None] * (3 * HEADS * D) + (HEADS + head) * D + d[None, :]
    k = tl.load(qkv + places, mask=(keys < L)[:, None], other=0.0)
    SUM: tl.constexpr = tl.int32 if qkv.dtype.element_ty == tl.int8 else tl.float32
    logits = tl.dot(q, tl.trans(k), out_dtype=SUM).to(tl.float32)
    logits = logits * scale
    if added is None:
        added = _added(position_bias, queries, keys, window, head, SIDE, WINDOW, SHIFT, BIAS_ROW)
    return tl.where((keys < L)[None, :], logits + added, float("-inf"))


@triton.jit
def _powers(logits, largest):
    """exp(logits - largest) of rows: one multiply-add and a power of two."""
    return exp2(logits * LOG2_E - (largest * LOG2_E)[:, None])


@triton.jit
def _values(qkv, keys, window, head, L: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    d = tl.arange(0, D)
    places = (window * L + keys)[:, None] * (3 * HEADS * D) + (2 * HEADS + head) * D + d[None, :]
    return tl.load(qkv + places, mask=(keys < L)[:, None], other=0.0)


@triton.jit
def _context(
    qkv, queries, window, head, logits_scale, position_bias, added, softmax_levels, context_scale,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BIAS_ROW: tl.constexpr, ONE_SCALE: tl.constexpr, BQ: tl.constexpr, BKEYS: tl.constexpr,
):  # fmt: skip
    """float32 [BQ, D], times `context_scale`; from int8 or float8 probabilities also times `softmax_levels`."""
    L: tl.constexpr = WINDOW * WINDOW
    d = tl.arange(0, D)
    rows = (window * L + queries)[:, None]
    q = tl.load(qkv + rows * (3 * HEADS * D) + head * D + d[None, :], mask=(queries < L)[:, None], other=0.0)
    scale = logits_scale if ONE_SCALE else tl.load(logits_scale + head)
    tile = tl.arange(0, BKEYS)
    TYPE: tl.constexpr = qkv.dtype.element_ty
    POWERS: tl.constexpr = tl.float16 if TYPE.primitive_bitwidth == 8 else TYPE
    SUM: tl.constexpr = tl.int32 if TYPE == tl.int8 else tl.float32
    # Hopper's tensor cores keep 14 bits of a sum of float8 products: add up in float32 after each tile of keys.
    # Products that start at zero, as of one tile and of q and k, have no sum to add to.
    STEP: tl.constexpr = BKEYS if TYPE == tl.float8e4nv else None

    if L <= BKEYS:
        logits = _logits(
            qkv, position_bias, added, q, queries, tile, window, head, scale,
            SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW,
        )  # fmt: skip
        v = _values(qkv, tile, window, head, L, HEADS, D)
        powers = _powers(logits, tl.max(logits, 1))
        total = tl.sum(powers, 1)
        if softmax_levels is not None:
            shares = as_type(powers * (softmax_levels / total)[:, None], TYPE)
            context = tl.dot(shares, v, out_dtype=SUM).to(tl.float32) * context_scale
        else:
            context = tl.dot(powers.to(POWERS), as_half(v, POWERS), out_dtype=tl.float32)
            context = context * (context_scale * reciprocal(total))[:, None]
    else:
        largest = tl.full([BQ], float("-inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        context = tl.zeros([BQ, D], tl.float32)
        for start in range(0, L, BKEYS):
            keys = start + tile
            logits = _logits(
                qkv, position_bias, None, q, queries, keys, window, head, scale,
                SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW,
            )  # fmt: skip
            larger = tl.maximum(largest, tl.max(logits, 1))
            powers = _powers(logits, larger)
            shrink = exp2((largest - larger) * LOG2_E)
            total = total * shrink + tl.sum(powers, 1)
            if softmax_levels is None:
                v = _values(qkv, keys, window, head, L, HEADS, D)
                context = tl.dot(powers.to(POWERS), as_half(v, POWERS), context * shrink[:, None], out_dtype=tl.float32)
            largest = larger
        if softmax_levels is not None:
            factor = softmax_levels / total
            sums = tl.zeros([BQ, D], SUM)
            for start in range(0, L, BKEYS):
                keys = start + tile
                logits = _logits(
                    qkv, position_bias, None, q, queries, keys, window, head, scale,
                    SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW,
                )  # fmt: skip
                shares = as_type(_powers(logits, largest) * factor[:, None], TYPE)
                v = _values(qkv, keys, window, head, L, HEADS, D)
                sums = tl.dot(shares, v, sums, out_dtype=SUM, max_num_imprecise_acc=STEP)
            context = sums.to(tl.float32) * context_scale
        else:
            context = context * (context_scale * reciprocal(total))[:, None]
    return context


@triton.jit
def _one_window(
    qkv, out, queries, window, head, logits_scale, position_bias, added, softmax_levels, context_scale,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BIAS_ROW: tl.constexpr, ONE_SCALE: tl.constexpr, BQ: tl.constexpr, BKEYS: tl.constexpr,
):  # fmt: skip
    L: tl.constexpr = WINDOW * WINDOW
    context = _context(
        qkv, queries, window, head, logits_scale, position_bias, added, softmax_levels, context_scale,
        SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW, ONE_SCALE, BQ, BKEYS,
    )  # fmt: skip
    places = (window * L + queries)[:, None] * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(out + places, as_type(context, out.dtype.element_ty), mask=(queries < L)[:, None])


@triton.jit
def attention(
    qkv, out, logits_scale, position_bias, softmax_levels, context_scale, windows_in_all,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BIAS_ROW: tl.constexpr, ONE_SCALE: tl.constexpr, BQ: tl.constexpr, BKEYS: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """`windows_in_all`: None if a program takes one window."""
    L: tl.constexpr = WINDOW * WINDOW
    COUNT: tl.constexpr = (SIDE // WINDOW) * (SIDE // WINDOW)
    window, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    queries = tl.program_id(1) * BQ + tl.arange(0, BQ)
    if WINDOWS == 1:
        _one_window(
            qkv, out, queries, window, head, logits_scale, position_bias, None, softmax_levels, context_scale,
            SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW, ONE_SCALE, BQ, BKEYS,
        )  # fmt: skip
    else:
        first = window // COUNT * (WINDOWS * COUNT) + window % COUNT
        added = None
        if L <= BKEYS:
            added = _added(position_bias, queries, tl.arange(0, BKEYS), first, head, SIDE, WINDOW, SHIFT, BIAS_ROW)
        for one in range(first, tl.minimum(first + WINDOWS * COUNT, windows_in_all), COUNT):
            _one_window(
                qkv, out, queries, one, head, logits_scale, position_bias, added, softmax_levels, context_scale,
                SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW, ONE_SCALE, BQ, BKEYS,
            )  # fmt: skip


@triton.jit
def attention_norm(
    qkv, w, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, logits_scale, position_bias,
    softmax_levels, context_scale, rows_in_all, eps, levels,
    N: tl.constexpr, POST: tl.constexpr,
    SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BIAS_ROW: tl.constexpr, ONE_SCALE: tl.constexpr, BQ: tl.constexpr, BKEYS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All heads one after another: each adds D channels to the projection's sums."""
    L: tl.constexpr = WINDOW * WINDOW
    OPERAND: tl.constexpr = w.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if OPERAND == tl.int8 else tl.float32
    window = tl.program_id(0)
    queries = tl.program_id(1) * BQ + tl.arange(0, BQ)
    w_places = w + tl.arange(0, BN)[:, None] * (HEADS * D) + tl.arange(0, D)[None, :]
    sums = zeros(N // BN, BQ, BN, SUM)
    for head in range(0, HEADS):
        context = _context(
            qkv, queries, window, head, logits_scale, position_bias, None, softmax_levels, context_scale,
            SIDE, WINDOW, SHIFT, HEADS, D, BIAS_ROW, ONE_SCALE, BQ, BKEYS,
        )  # fmt: skip
        part = as_type(context, OPERAND)
        sums = accumulated(sums, part, w_places + head * D, HEADS * D, BN, SUM)
    rows = tl.where(queries < L, window * L + queries, rows_in_all)  # queries past the window: not written
    finish_rows(
        sums, rows, scale, bias, residual, out, norm_weight, norm_bias, out_quantized, rows_in_all, eps, levels,
        POST, SIDE, WINDOW, SHIFT, BQ, BN,
    )  # fmt: skip
