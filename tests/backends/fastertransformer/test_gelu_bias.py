"""The GELU kernel's addresses, walked thread by thread (docs/reference/weights.md, section 3.9)."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swin_quant.backends.fastertransformer.gelu_bias import LARGEST, as_read, is_misread, shifted


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


channels = st.integers(1, LARGEST // 32).map(lambda tiles: 32 * tiles)


@settings(max_examples=15)
@given(channels, st.integers(1, 3), st.data())
@example(4096, 2, None)
@example(4128, 2, None)
@example(6144, 2, None)
@example(LARGEST, 2, None)
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


@pytest.mark.parametrize("n", [LARGEST + 32, 11264])
def test_beyond_two_rounds_channels_are_left_out(n):
    """No array of biases can help, and such models are refused."""
    assert set(range(n)) - walk(n, 1, 0).keys() == set(range(8192, 8196))
