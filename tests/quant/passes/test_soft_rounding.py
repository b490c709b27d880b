"""Soft rounding: it starts at the float weight and ends on the grid, next to it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant.fake_quant import grid, quantize_dequantize
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.passes.reconstruct import Rounding, rectified, rounding_of, undecided, variable_of
from tests.helpers.settings import change

SEEDS, BITS = st.integers(0, 10_000), st.integers(2, 8)


def weight_of(seed, scale=1.0):
    return scale * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))


def largest(weight, by_row):
    return weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()


@given(SEEDS, BITS, st.booleans(), st.booleans())
def test_it_starts_at_the_float_weight(seed, bits, by_row, narrow):
    weight = weight_of(seed)
    amax = largest(weight, by_row)
    soft = Rounding.of(weight, amax, *grid(bits, narrow)).soft()
    assert torch.allclose(soft, weight, atol=1e-5 * amax.max())


@given(SEEDS, BITS, st.booleans(), st.floats(0.2, 1.0), st.integers(-8, 8))
def test_it_ends_on_the_grid_within_a_step_of_the_nearest_level(seed, bits, by_row, share, drift):
    weight = weight_of(seed)
    amax, ends = share * largest(weight, by_row), grid(bits)
    rounding = Rounding.of(weight, amax, *ends)
    rounding.variable.add_(drift * weight_of(seed + 1))
    hard = rounding.hard()
    assert torch.equal(quantize_dequantize(hard, amax, *ends), hard)
    nearest = quantize_dequantize(weight, amax, *ends)
    assert ((hard - nearest).abs() <= amax / ends[1] * (1 + 1e-5)).all()


@given(SEEDS, BITS)
def test_untouched_it_rounds_to_the_nearest_level(seed, bits):
    weight = weight_of(seed)
    amax, ends = weight.abs().max(), grid(bits)
    assert torch.allclose(Rounding.of(weight, amax, *ends).hard(), quantize_dequantize(weight, amax, *ends), atol=1e-6)


def test_shares_and_variables_are_inverse_and_all_shares_are_reached():
    shares = torch.linspace(0, 1, 101)
    assert torch.allclose(rectified(variable_of(shares)), shares, atol=1e-6)


def test_the_pull_is_nothing_at_levels_and_reaches_farther_the_less_steep_it_is():
    assert undecided(variable_of(torch.tensor([0.0, 1.0, 1.0])), 4.0).item() == pytest.approx(0, abs=1e-4)
    assert undecided(variable_of(torch.tensor([0.5, 0.5])), 4.0).item() == pytest.approx(2)
    slopes = []
    for steepness in (20.0, 2.0):
        variable = variable_of(torch.tensor([0.6])).requires_grad_()
        undecided(variable, steepness).backward()
        slopes.append(-variable.grad.item())
    assert 0 <= slopes[0] < 1e-6 < slopes[1]


def test_rows_of_zeros_stay_zeros():
    rounding = Rounding.of(torch.zeros(2, 3), torch.zeros(2, 1), -8, 7)
    assert rounding.soft().eq(0).all() and rounding.hard().eq(0).all()


def test_a_range_that_was_chosen_with_the_weight_stays():
    layer = QuantLinear(7, 5)
    node = layer._weight_quantizer
    change(node, bits=4, granularity="per-channel")
    node.amax = torch.full((5, 1), 0.9)
    layer.weight.data = quantize_dequantize(weight_of(3), node.amax, -8, 7)
    assert torch.equal(rounding_of(layer).amax, node.amax)
    layer.weight.data = weight_of(3)  # not on any grid: clipping a little costs less than coarse steps
    node.amax = weight_of(3).abs().max()
    found = rounding_of(layer)
    rough = quantize_dequantize(layer.weight.data, largest(layer.weight.data, True), -8, 7)
    assert found.amax.shape == (5, 1)
    assert (found.hard() - layer.weight.data).norm() < (rough - layer.weight.data).norm()
