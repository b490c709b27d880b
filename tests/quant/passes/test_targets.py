"""The Fisher matrix's diagonal, against closed forms and brute force."""

import itertools

import pytest
import torch
from torch import nn

from swin_quant.quant.passes.targets import channel_weights, picture_gradients, root_times_signs


def test_the_mean_of_outer_products_over_all_signs_is_the_hessian_of_the_divergence():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)
    vectors = root_times_signs(logits.expand(len(signs), 4), signs)
    found = vectors.T @ vectors / len(signs)
    p = logits.softmax(0)

    def divergence(other):
        return (p * (p.log() - other.log_softmax(0))).sum()

    assert torch.allclose(found, torch.autograd.functional.hessian(divergence, logits), atol=1e-12)


def test_the_weights_of_a_linear_network_are_those_of_the_closed_form():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    picture = torch.randn(1, 3)
    found = channel_weights(model, ["0"], [picture.expand(4000, 3)] * 4, seed=0)["0"]
    p = model(picture).softmax(1)[0].detach()
    w = model[1].weight.detach()
    wanted = (w.T @ (p.diag() - p.outer(p)) @ w).diagonal()
    assert torch.allclose(found, wanted / wanted.mean(), rtol=0.05)


@pytest.mark.slow
def test_draws_of_a_picture_have_the_whole_matrix_of_the_closed_form():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    pictures = torch.randn(2, 3)
    found = picture_gradients(model, "0", [pictures[:1], pictures[1:]], 8000, seed=0).float()
    assert found.shape == (2, 8000, 4) and abs(found.square().mean() - 1) < 0.01
    w = model[1].weight.detach()
    p = model(pictures).softmax(1).detach()
    wanted = torch.stack([w.T @ (each.diag() - each.outer(each)) @ w for each in p])
    wanted /= wanted.diagonal(dim1=1, dim2=2).mean()
    means = found.transpose(1, 2) @ found / 8000
    assert torch.allclose(means, wanted, atol=0.1)
