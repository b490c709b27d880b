"""Layouts of int8 matrices and packed masks: the specification's vectors, inverses; GELU's misread biases."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swin_quant.backends.fastertransformer.layouts import (
    MOST_HIDDEN,
    PADDING,
    WEIGHT_LAYOUTS,
    as_read,
    col4_4r2_8c,
    col32_2r_4r4,
    exchange_heads,
    is_misread,
    pack,
    padded_side,
    quantize_weight,
    scatter,
    shifted,
    source,
    unpack,
    weight_layout,
)

# docs/reference, section 3.3, n = 96: (r, c) -> COL32_2R_4R4, COL4_4R2_8C
VECTORS = {
    (0, 1): (1, 1), (0, 4): (4, 16), (0, 8): (8, 32), (0, 31): (31, 115), (0, 32): (3072, 3072), (1, 0): (32, 128),
    (2, 0): (256, 4), (3, 5): (293, 149), (7, 31): (831, 255), (8, 0): (64, 256), (9, 3): (99, 387),
    (16, 0): (128, 512), (31, 31): (1023, 1023), (32, 0): (1024, 1024), (33, 40): (4136, 4256), (95, 95): (9215, 9215),
}  # fmt: skip
TILES = st.integers(1, 6).map(lambda count: 32 * count)


@pytest.mark.parametrize(("at", "offsets"), VECTORS.items())
def test_the_specification_s_vectors(at, offsets):
    assert (col32_2r_4r4(96, 96)[at].item(), col4_4r2_8c(96, 96)[at].item()) == offsets


@given(st.sampled_from([*WEIGHT_LAYOUTS.values()]), TILES, TILES, st.integers(0, 99))
def test_indexing_undoes_scatter(offsets, rows, columns, seed):
    matrix = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert torch.equal(scatter(matrix, offsets)[offsets(rows, columns)], matrix)


@pytest.mark.parametrize(("sm", "layout"), [(75, "COL4_4R2_8C"), (80, "COL32_2R_4R4"), (90, "COL32_2R_4R4")])
def test_the_gpu_decides_the_layout(sm, layout):
    assert weight_layout(sm) == layout


def test_weights_are_rounded_half_to_even_after_float16_and_saturate_at_minus_128():
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -2.5, 127.0, 300.0, -128.0, -300.0, 64.51]])
    expected = [0, 2, 2, 0, -2, 127, 127, -128, -128, 64]  # 64.51 is 64.5 in float16, rounded half to even
    assert quantize_weight(weight, 127.0)[0].tolist() == expected


def test_heads_are_interleaved_as_the_float_op_reads_them():
    heads, dim = 3, 2
    rows = torch.tensor([[kind, head, i] for kind in range(3) for head in range(heads) for i in range(dim)])
    expected = [[kind, head, i] for head in range(heads) for kind in range(3) for i in range(dim)]
    assert exchange_heads(rows, 3, heads).tolist() == expected
    assert torch.equal(exchange_heads(exchange_heads(rows, 3, heads), heads, 3), rows)


# docs/reference, section 3.6: S, (row, lane) -> (row, column) of the matrix
PACKED_VECTORS = [
    (64, (0, 1), (0, 2)), (64, (0, 4), (1, 0)), (64, (1, 0), (0, 8)), (64, (2, 0), (8, 0)), (64, (4, 0), (16, 0)),
    (64, (8, 0), (0, 16)), (64, (16, 0), (0, 32)), (64, (63, 31), (63, 62)), (256, (4, 0), (0, 16)),
    (256, (8, 0), (0, 32)), (256, (16, 0), (0, 64)), (256, (63, 31), (15, 254)), (256, (1023, 31), (255, 254)),
]  # fmt: skip


@pytest.mark.parametrize(("side", "packed", "matrix"), PACKED_VECTORS)
def test_the_specification_s_packed_vectors(side, packed, matrix):
    row, column = source(torch.tensor(packed[0]), torch.tensor(packed[1]), side)
    assert (row.item(), column.item()) == matrix


@given(st.integers(1, 256), st.booleans(), st.integers(1, 3))
def test_unpacking_gives_the_mask_back(tokens, int8, count):
    mask = torch.randn(count, tokens, tokens, generator=torch.Generator().manual_seed(tokens)).half()
    side = padded_side(tokens, int8)
    packed = pack(mask, side)
    assert packed.shape == (count, side, side) and (packed == PADDING).sum() == count * (side**2 - tokens**2)
    assert torch.equal(unpack(packed, tokens), mask)


@pytest.mark.parametrize(("tokens", "int8", "float_"), [(49, 64, 64), (64, 64, 64), (100, 256, 128), (144, 256, 256)])
def test_sides(tokens, int8, float_):
    assert (padded_side(tokens, True), padded_side(tokens, False)) == (int8, float_)


def walk(n, m, row):
    """{channel: place of its bias} of one block of the grid: the half kernel's loop step by step."""
    channel_at = {c // 32 * 32 * m + 32 * row + c % 32: c for c in range(n)}  # COL32 (section 3.3)
    block = min(n // 4, 1024)
    read = {}
    for thread in range(block):
        place = thread << 2
        while place < n:
            quad = ((place & 0xFFFFFFE0) * m + (row << 5) + (place & 31)) >> 2
            for lane in range(4):
                place += lane > 0
                read[channel_at[4 * quad + lane]] = place
            place += block << 2
    return read


channels = st.integers(1, MOST_HIDDEN // 32).map(lambda tiles: 32 * tiles)


@settings(max_examples=15)
@given(channels, st.integers(1, 3), st.data())
@example(4096, 2, None)
@example(4128, 2, None)
@example(6144, 2, None)
@example(MOST_HIDDEN, 2, None)
def test_what_is_read_and_what_undoes_it(n, m, data):
    row = data.draw(st.integers(0, m - 1)) if data else 1
    read = walk(n, m, row)
    bias = torch.arange(1, n + 1)
    assert read.keys() == set(range(n))
    by_walk = [int(bias[read[c]]) if read[c] < n else 0 for c in range(n)]
    assert as_read(bias, n).tolist() == by_walk
    assert is_misread(n) == (by_walk != bias.tolist()) == (n > 4096)
    array = shifted(bias)
    assert len(array) == n + 3 * is_misread(n) and [int(array[read[c]]) for c in range(n)] == bias.tolist()
    assert torch.equal(as_read(array, n), bias)
