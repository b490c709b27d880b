"""Geometry of windows against its definitions, token by token (docs/reference, section 1.2)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.models import maps
from swin_quant.models.maps import relative_coords_table, window_partition, window_reverse


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_reverse_undoes_partition(batch, rows, columns, window, channels):
    x = torch.arange(batch * rows * columns * window**2 * channels).view(
        batch, rows * window, columns * window, channels
    )
    windows = window_partition(x, window)
    assert windows.shape == (batch * rows * columns, window**2, channels)
    assert torch.equal(window_reverse(windows, window, rows * window, columns * window), x)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_windows_are_squares_of_the_map_row_by_row(batch, rows, columns, window):
    x = torch.arange(batch * rows * columns * window**2).view(batch, rows * window, columns * window, 1)
    cut = [
        x[b, r * window : (r + 1) * window, c * window : (c + 1) * window].reshape(-1, 1)
        for b in range(batch)
        for r in range(rows)
        for c in range(columns)
    ]
    assert torch.equal(window_partition(x, window), torch.stack(cut))


def region(row, column, resolution, window, shift):
    """The region, of 9, on the shifted map: slices [0, -w), [-w, -s), [-s, end) of rows and columns."""

    def band(at):
        return 0 if at < resolution - window else 1 if at < resolution - shift else 2

    return 3 * band(row) + band(column)


@pytest.mark.parametrize(("resolution", "window", "shift"), [(8, 4, 2), (14, 7, 3), (6, 2, 1), (12, 4, 2), (9, 3, 1)])
def test_mask_forbids_tokens_of_different_regions(resolution, window, shift):
    side = resolution // window
    expected = torch.empty(side * side, window**2, window**2)
    for w in range(side * side):
        top, left = w // side * window, w % side * window
        for a in range(window**2):
            for b in range(window**2):
                regions = {region(top + t // window, left + t % window, resolution, window, shift) for t in (a, b)}
                expected[w, a, b] = 0.0 if len(regions) == 1 else -100.0
    mask = maps.mask(resolution, resolution, (window, window), (shift, shift))
    assert mask.dtype == torch.float32 and torch.equal(mask, expected)


@pytest.mark.parametrize(("window", "pretrained"), [(4, 0), (7, 0), (8, 8), (16, 12), (24, 12), (8, 6)])
def test_coords_table_is_that_of_the_formula(window, pretrained):
    def f(t):
        z = 8 * t / ((pretrained if pretrained > 0 else window) - 1)
        return math.copysign(math.log2(abs(z) + 1) / 3, z)

    table = relative_coords_table(window, pretrained)
    assert table.shape == (1, 2 * window - 1, 2 * window - 1, 2) and table.dtype == torch.float32
    for u in range(2 * window - 1):
        for v in range(2 * window - 1):
            expected = (f(u - (window - 1)), f(v - (window - 1)))
            assert table[0, u, v].tolist() == pytest.approx(expected, abs=1e-6)
