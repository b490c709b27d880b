"""Rounding by columns: against the textbook, against every combination of levels, and its bound."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.quant.passes.gptq import gptq, nearest, nearest_where_better, row_errors
from tests.helpers.rounding_problem import problem

SEEDS = st.integers(0, 2**31)


def scales(weight, qmax):
    return weight.abs().amax(1, keepdim=True) / qmax


@given(SEEDS, st.integers(2, 8), st.integers(1, 30), st.floats(0, 3))
def test_no_row_is_worse_than_rounded_to_nearest(seed, bits, columns, mixing):
    weight, hessian = problem(seed, columns=columns, mixing=mixing)
    qmax = 2 ** (bits - 1) - 1
    scale = scales(weight, qmax)
    found = nearest_where_better(gptq(*(mine := (weight, hessian, scale, -qmax - 1, qmax))), *mine)
    assert found.min() >= -qmax - 1 and found.max() <= qmax and torch.equal(found, found.round())
    plain = nearest(weight, scale, -qmax - 1, qmax)
    errors = [row_errors(weight - levels * scale, hessian) for levels in (found, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all()


@given(SEEDS, st.floats(0, 3))
def test_unclipped_rows_stay_within_their_bound(seed, mixing):
    """With H = R R^T, R upper triangular, a row's error is |(w - q) R|^2, and GPTQ, which goes backwards through it
    (Babai's nearest plane), leaves at most half a step times R_jj in each term."""
    weight, hessian = problem(seed, mixing=mixing)
    order = hessian.diagonal().argsort(descending=True)
    scale = scales(weight, 7)
    found = gptq(weight, hessian, scale, -(10**6), 10**6)
    upper = torch.linalg.cholesky(hessian[order][:, order].flip(0, 1)).flip(0, 1)
    bound = (scale / 2).square().flatten() * upper.diagonal().square().sum()
    assert (row_errors(weight - found * scale, hessian) <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("block", [1, 5, 128])
def test_it_is_the_textbook_s_with_an_inverse_for_each_column(block, monkeypatch):
    monkeypatch.setattr("swin_quant.quant.passes.gptq.BLOCK", block)
    weight, hessian = problem(3)
    scale = scales(weight, 7)
    rest, left, expected = weight.clone(), hessian.diagonal().argsort(descending=True).tolist(), torch.zeros(5, 12)
    while left:
        inverse = torch.linalg.inv(hessian[left][:, left])
        level = (rest[:, left[0]] / scale[:, 0]).round().clamp(-8, 7)
        error = (rest[:, left[0]] - level * scale[:, 0]) / inverse[0, 0]
        rest[:, left] -= torch.outer(error, inverse[0])
        expected[:, left.pop(0)] = level.float()
    assert torch.equal(gptq(weight, hessian, scale, -8, 7).float(), expected)


@given(SEEDS)
def test_of_all_combinations_none_is_better_where_columns_do_not_correlate(seed):
    weight, hessian = problem(seed, rows=2, columns=3)
    hessian = torch.diag(hessian.diagonal())
    scale = scales(weight, 1)
    levels = torch.tensor(list(product(range(-2, 2), repeat=3)), dtype=torch.float64)
    best = [row_errors(row - levels * step, hessian).min() for row, step in zip(weight, scale, strict=True)]
    found = gptq(weight, hessian, scale, -2, 1)
    assert torch.allclose(row_errors(weight - found * scale, hessian), torch.stack(best))


def test_what_has_no_inverse_is_refused():
    weight, _ = problem(0)
    with pytest.raises(torch.linalg.LinAlgError):
        gptq(weight, torch.zeros(12, 12).double(), scales(weight, 7), -8, 7)
