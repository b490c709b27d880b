"""Rounding by halves: against every combination of levels, and what a ridge regression leaves."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant.passes.halves import by_halves, flipped
from swin_quant.quant.passes.rounding import nearest, row_errors
from tests.helpers.rounding_problem import problem

SEEDS = st.integers(0, 2**31)


def four_bits(seed, rows=6, columns=8, mixing=1.0):
    """Weight, covariance, and scales [rows, 1] of a grid of 4 bits."""
    weight, hessian = problem(seed, rows, columns, mixing)
    return weight, hessian, weight.abs().amax(1, keepdim=True) / 7


@given(SEEDS, st.integers(1, 30), st.floats(0, 3))
def test_flips_make_no_row_worse_and_stay_next_to_the_weight(seed, columns, mixing):
    weight, hessian, scale = four_bits(seed, columns=columns, mixing=mixing)
    found, plain = flipped(weight, hessian, scale, -8, 7), nearest(weight, scale, -8, 7)
    errors = [row_errors(weight - levels * scale, hessian) for levels in (found, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all()
    assert ((found - weight / scale).abs() <= 1 + 1e-9).all() and torch.equal(found, found.round())
    assert found.min() >= -8 and found.max() <= 7


@given(SEEDS)
def test_no_single_flip_is_left_that_would_help(seed):
    weight, hessian, scale = four_bits(seed)
    found = flipped(weight, hessian, scale, -8, 7)
    least = row_errors(weight - found * scale, hessian)
    for column, by in product(range(8), (-1, 1)):
        tried = found.clone()
        tried[:, column] += by
        beside = ((tried - weight / scale).abs() < 1)[:, column] & (tried.abs() <= 7)[:, column]
        errors = row_errors(weight - tried * scale, hessian)
        assert (errors >= least * (1 - 1e-9))[beside].all()


def test_two_halves_are_what_an_ordinary_regression_and_flips_give():
    """With two columns: the first rounded, the second, solved for by least squares on inputs that have this covariance,
    rounded."""
    weight, hessian, scale = four_bits(4, rows=50, columns=2)
    first, second = hessian.diagonal().argsort(descending=True).tolist()
    inputs = torch.linalg.cholesky(hessian).T  # X with X^T X = H
    expected = torch.empty_like(weight)
    expected[:, first] = (weight[:, first] / scale[:, 0]).round().clamp(-8, 7)
    wanted = inputs @ weight.T - inputs[:, [first]] @ (expected[:, first] * scale[:, 0])[None]
    solved = torch.linalg.lstsq(inputs[:, [second]], wanted).solution[0]
    expected[:, second] = (solved / scale[:, 0]).round().clamp(-8, 7)
    assert torch.equal(by_halves(weight, hessian, scale, -8, 7), expected)


@given(SEEDS, st.floats(0.5, 3))
def test_it_is_nearer_to_the_best_of_all_combinations_than_rounding_to_nearest(seed, mixing):
    """On average over rows; of single rows either may be the better by chance."""
    weight, hessian, scale = four_bits(seed, rows=40, columns=4, mixing=mixing)
    near = (weight / scale).floor()
    every = torch.stack([near + torch.tensor(bits) for bits in product((-1.0, 0.0, 1.0, 2.0), repeat=4)]).clamp(-8, 7)
    best = torch.stack([row_errors(weight - levels * scale, hessian) for levels in every]).min(0).values
    lost = [
        (row_errors(weight - levels * scale, hessian) - best).sum()
        for levels in (by_halves(weight, hessian, scale, -8, 7), nearest(weight, scale, -8, 7))
    ]
    assert lost[0] <= lost[1]


def test_what_has_no_inverse_is_refused():
    weight, _, scale = four_bits(0)
    with pytest.raises(torch.linalg.LinAlgError):
        by_halves(weight, torch.zeros(8, 8).double(), scale, -8, 7)
