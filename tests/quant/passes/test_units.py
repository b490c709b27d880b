"""Units: together they are the forward pass."""

import itertools

import pytest
import torch
from torch import nn

from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.targets import channel_weights, root_times_signs
from swin_quant.quant.passes.trial import Trial, enabled_in
from swin_quant.quant.passes.units import entering
from tests.helpers.settings import change


def walk(model, images):
    return PassContext(model, images, units=list_units(model), changes=False).walk(images)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_walk_meets_what_the_network_itself_gives_its_units(kind, tiny_model):
    model, images = tiny_model(kind), torch.randn(5, 3, 32, 32)
    for run in walk(model, images.split(2)):
        with torch.inference_mode():
            direct = entering(model, run.unit, images.split(2))
        assert all(torch.equal(one, other) for one, other in zip(run.inputs, direct, strict=True))
    assert run.outputs[0].shape[0] == 2


def test_a_unit_that_is_changed_leaves_the_next_its_input(tiny_model):
    model, images = tiny_model("swin"), [torch.randn(2, 3, 32, 32)]
    untouched = [run.inputs[0] for run in walk(model, images)]
    changed = []
    for run in walk(model, images):
        changed.append(run.inputs[0])
        for parameter in run.unit.parameters():
            parameter.data.zero_()
    assert all(torch.equal(one, other) for one, other in zip(untouched, changed, strict=True))


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


@pytest.mark.parametrize("method", [None, "max"])
def test_zero_points_take_from_a_unit_s_error_and_their_ranges_come_back(method, tiny_model, use_policy):
    model, images = tiny_model("swin"), torch.randn(8, 3, 32, 32)
    calibrate(model, [images])
    use_policy(model, "cpu")
    asked = 0
    for run in walk(model, [images]):
        nodes = [node for node in enabled_in(run.unit) if not node.setting.symmetric]
        if nodes:
            before = [(node.amax, node.bounds) for node in nodes]
            error = Trial(run, method).error()
            assert all(torch.equal(node.amax, amax) and torch.equal(node.bounds, ends)
                       for node, (amax, ends) in zip(nodes, before, strict=True))  # fmt: skip
            for node in nodes:
                change(node, symmetric=True)
            assert 0 < error < Trial(run, method).error()
            asked += 1
        if asked > 1:
            break
    assert asked > 1
