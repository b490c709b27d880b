"""A node's observer keeps the exact maximum, and its histogram counts what numpy counts, in any order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from swin_quant.quant.observers import BINS, ActivationObserver, Histogram, NonFiniteError, add_sides
from swin_quant.quant.ranges import search_range


def observed(x, limit=None):
    """Show all pictures in one batch."""
    made = ActivationObserver("some.node", torch.device("cpu"), True, limit)
    made.count.pictures = len(x)
    made(x)
    return made


@given(st.integers(0, 2 * 37 * 41 - 1), st.sampled_from([1.0, -1.0]))
def test_the_maximum_is_exact_wherever_it_hides(place, sign):
    x = torch.randn(2, 37, 41)
    x.view(-1)[place] = sign * 77.7
    made = observed(x, limit=20)
    assert made.statistics().largest == np.float32(77.7)
    assert search_range("max", made.statistics()) == np.float32(77.7)


@pytest.mark.parametrize("shape", [(3136, 96), (64, 3, 49, 49), (64, 3, 49, 32), (49, 3072), (784, 384), (16, 576, 96)])
def test_a_subset_leaves_out_no_channel_and_no_token(shape):
    """Each channel, or token, has its own value, which must be counted at least once."""
    limit = 4096
    for axis in range(len(shape)):
        if shape[axis] > limit / 2:
            continue
        levels = torch.arange(shape[axis]).view([-1 if a == axis else 1 for a in range(len(shape))]) + 1.0
        statistics = observed(levels.expand(shape)[None].contiguous(), limit).statistics()
        assert np.count_nonzero(statistics.counts) == shape[axis]
        assert limit / 2 < statistics.counts.sum() <= limit


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("limit", [None, 5])
def test_non_finite_values_are_refused_with_the_node(value, limit):
    x = torch.randn(2, 100)
    x[1, 98] = value
    with pytest.raises(NonFiniteError, match="some.node"):
        observed(x, limit)


MAGNITUDES = st.one_of(st.just(0.0), st.floats(0, 0.125, width=32), st.floats(0, 2.0**127, width=32))


def filled(*batches):
    histogram = Histogram.empty()
    for batch in batches:
        values = torch.as_tensor(np.asarray(batch, np.float32))
        add_sides(Histogram.empty(), histogram, values, 0.0, values.max().item())
    return histogram


def same(one, other):
    return one.exponent == other.exponent and torch.equal(one.counts, other.counts)


def brute_force(values):
    """Counts over [0, 2**e) for the smallest e, not below -100, that holds the values."""
    exponent = -100
    while 2.0**exponent <= max(values):
        exponent += 1
    counts = np.zeros(BINS, np.int64)
    for value in values:
        counts[math.floor(float(value) / 2.0**exponent * BINS)] += 1
    return exponent, counts


@given(st.lists(MAGNITUDES, min_size=1, max_size=60))
@example([1e-45, 3e38])  # the ends of float32
@example([3.4028235e38])
@example([1e-45])
@example([2.0**-126, 2.0**-125])
@example([0.0])
def test_counts_are_those_of_brute_force(values):
    histogram = filled(values)
    exponent, counts = brute_force(values)
    assert histogram.exponent == exponent and histogram.counts.tolist() == counts.tolist()
    assert histogram.width == 2.0**exponent / BINS and same(histogram, filled(*([value] for value in values)))


def test_counts_above_float32_are_exact():
    """float32 counts stop at 2**24; these must not."""
    histogram = Histogram.empty()
    many = torch.full((2**24 + 1,), 0.75)
    add_sides(Histogram.empty(), histogram, many, 0.0, 0.75)
    add_sides(Histogram.empty(), histogram, many, 0.0, 0.75)
    add_sides(Histogram.empty(), histogram, torch.tensor([0.75, 0.1]), 0.0, 0.75)
    assert histogram.counts[int(0.75 * BINS)] == 2**25 + 3 and histogram.counts.sum() == 2**25 + 4
    histogram.counts += 2**40
    histogram.widen(1)
    assert histogram.counts[int(0.75 * BINS) // 2] == 2**25 + 3 + 2**41
