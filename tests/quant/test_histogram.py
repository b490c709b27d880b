"""The streaming histogram counts what numpy counts, whatever the order of values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant.observers import BINS, Histogram, add_sides, exponent_above

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
def test_counts_are_those_of_brute_force(values):
    histogram = filled(values)
    exponent, counts = brute_force(values)
    assert histogram.exponent == exponent and histogram.counts.tolist() == counts.tolist()
    assert histogram.width == 2.0**exponent / BINS


def test_counts_are_those_of_numpy():
    values = np.abs(np.random.default_rng(0).normal(size=100_000)).astype(np.float32)
    histogram = filled(values)
    counts, _ = np.histogram(values, bins=BINS, range=(0, 8))
    assert histogram.exponent == 3 and histogram.counts.tolist() == counts.tolist()


@given(st.lists(MAGNITUDES, min_size=1, max_size=60), st.data())
def test_any_order_and_any_batches_give_the_same(values, data):
    shuffled = data.draw(st.permutations(values))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=5))
    edges = [0, *sorted(cuts), len(values)]
    batches = [shuffled[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]
    assert same(filled(values), filled(*batches))


@pytest.mark.parametrize("batches", [([0.0], [0.001]), ([0.001], [0.0, 0.0])])
def test_a_batch_of_zeros_does_not_coarsen_the_bins(batches):
    """A picture with only zeros at a node must count as it does inside a larger batch."""
    assert same(filled(*batches), filled(sum(batches, [])))


@given(st.lists(MAGNITUDES, min_size=1, max_size=30), st.lists(MAGNITUDES, min_size=1, max_size=30))
def test_merged_after_widening_two_are_one(one, other):
    first, second = filled(one), filled(other)
    exponent = max(first.exponent, second.exponent)
    first.widen(exponent)
    second.widen(exponent)
    merged = filled(one, other)
    assert merged.exponent == exponent and torch.equal(first.counts + second.counts, merged.counts)


@given(st.lists(MAGNITUDES, min_size=1, max_size=30))
def test_no_value_is_lost_and_at_least_half_the_bins_are_used(values):
    histogram = filled(values)
    assert histogram.counts.sum() == len(values) and histogram.counts.dtype == torch.int64
    assert histogram.counts.shape == (BINS,)
    if max(values) > 2.0**-100:
        assert BINS / 2 <= histogram.counts.nonzero().max().item()


def test_widening_to_less_changes_nothing():
    histogram = filled([1.0, 3.0])
    before = Histogram(histogram.counts.clone(), histogram.exponent)
    histogram.widen(1)
    histogram.widen(2)
    assert same(histogram, before)


@pytest.mark.parametrize("values", [[1e-45, 3e38], [3.4028235e38], [1e-45], [2.0**-126, 2.0**-125], [0.0]])
def test_the_ends_of_float32(values):
    histogram = filled(values)
    exponent, counts = brute_force(values)
    assert histogram.exponent == exponent and histogram.counts.tolist() == counts.tolist()
    assert same(histogram, filled(*([value] for value in values)))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_takes_any_float_type(dtype):
    values = torch.rand(10, 10).to(dtype)
    histogram = Histogram.empty()
    add_sides(Histogram.empty(), histogram, values, 0.0, values.max().item())
    assert same(histogram, filled(values.float().flatten().numpy()))


@given(st.floats(2.0**-100, 1e38))
def test_exponent_is_the_smallest_above(value):
    assert value < 2.0 ** exponent_above(value) and 2.0 ** (exponent_above(value) - 1) <= value


def test_exponent_of_nothing_is_the_smallest_there_is():
    assert exponent_above(0.0) == exponent_above(1e-45) == Histogram.empty().exponent
