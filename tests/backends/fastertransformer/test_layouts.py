"""Layouts of int8 matrices: the specification's test vectors, bijectivity, inverses, quantization of weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.fastertransformer.layouts import (
    WEIGHT_LAYOUTS,
    col4_4r2_8c,
    col32_2r_4r4,
    gather,
    interleave_heads,
    quantize_weight,
    scatter,
    separate_heads,
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


@given(st.sampled_from([*WEIGHT_LAYOUTS.values()]), TILES, TILES)
def test_every_byte_is_used_once(offsets, rows, columns):
    assert torch.equal(offsets(rows, columns).flatten().sort().values, torch.arange(rows * columns))


@given(st.sampled_from([*WEIGHT_LAYOUTS.values()]), TILES, TILES, st.integers(0, 99))
def test_gather_undoes_scatter(offsets, rows, columns, seed):
    matrix = torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert torch.equal(gather(scatter(matrix, offsets), rows, columns, offsets), matrix)


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
    assert interleave_heads(rows, heads).tolist() == expected
    assert torch.equal(separate_heads(interleave_heads(rows, heads), heads), rows)
