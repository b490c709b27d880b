"""Packed masks: the specification's test vectors, and an inverse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.fastertransformer.layouts import PADDING, pack, padded_side, source, unpack
from swin_quant.base.errors import SwinQuantError

# docs/reference, section 3.6: S, (row, lane) -> (row, column) of the matrix
VECTORS = [
    (64, (0, 1), (0, 2)), (64, (0, 4), (1, 0)), (64, (1, 0), (0, 8)), (64, (2, 0), (8, 0)), (64, (4, 0), (16, 0)),
    (64, (8, 0), (0, 16)), (64, (16, 0), (0, 32)), (64, (63, 31), (63, 62)), (256, (4, 0), (0, 16)),
    (256, (8, 0), (0, 32)), (256, (16, 0), (0, 64)), (256, (63, 31), (15, 254)), (256, (1023, 31), (255, 254)),
]  # fmt: skip


@pytest.mark.parametrize(("side", "packed", "matrix"), VECTORS)
def test_the_specification_s_vectors(side, packed, matrix):
    row, column = source(torch.tensor(packed[0]), torch.tensor(packed[1]), side)
    assert (row.item(), column.item()) == matrix


@pytest.mark.parametrize("side", [64, 128, 256, 384])
def test_every_position_is_packed_once(side):
    row, column = source(torch.arange(side * side // 64)[:, None], torch.arange(32)[None], side)
    assert torch.equal((row * side + column).flatten().sort().values, torch.arange(0, side * side, 2))


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


def test_padding_that_is_none():
    packed = pack(torch.zeros(1, 49, 49), 64)
    packed[packed == PADDING] = 0
    with pytest.raises(SwinQuantError, match="not padded with -30000"):
        unpack(packed, 49)
