"""Calibrator auto: each node by its range's cost, never worse than one method for all."""

import pytest
import torch
from nightly import share
from pass_contexts import decibels, logits
from torch import nn

from swin_quant.models.registry import list_units
from swin_quant.quant.auto_calibrator import choose_methods
from swin_quant.quant.calibration import Method, observe, set_ranges
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.passes import PassContext
from swin_quant.quant.policy import Rule, apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import State, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS

AUTO = Method("auto")
SMALL = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}


def sqnr(model, images):
    return decibels(logits(model, images), model(images).detach())


class Net(nn.Module):
    """`keeps` passes on only a rare large value, `drops` everything else: each needs another method."""

    def __init__(self):
        super().__init__()
        self.keeps, self.drops = QuantLinear(64, 8, bias=False), QuantLinear(64, 8, bias=False)
        generator = torch.Generator().manual_seed(0)
        for layer in (self.keeps, self.drops):
            layer.weight.data = torch.randn(8, 64, generator=generator)
        self.keeps.weight.data[:, 1:] *= 0.01
        self.drops.weight.data[:, 0] = 0

    def forward(self, x):
        x = x.flatten(1)[:, :64] * torch.cat([torch.tensor([40.0]), torch.ones(63)])
        return torch.cat([self.keeps(x), self.drops(x)], 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_nodes_that_want_different_methods_get_them(bits):
    model, images = Net(), torch.randn(16, 3, 5, 5)
    apply_policy(model, load_policy("qdq").and_then(Rule(nodes=("role:gemm_input",), bits=bits)))
    calibration = observe(model, [images], AUTO)
    set_ranges(model, calibration, AUTO)
    before = {name: node.amax.clone() for name, node in named_nodes(model).items()}
    found = choose_methods(PassContext(model, images.split(8), AUTO), calibration)
    assert all(torch.equal(node.amax, before[name]) for name, node in named_nodes(model).items())
    assert all(node.state is State.OFF for node in named_nodes(model).values())
    reached = {}
    for name in (*RANGE_METHODS, None):
        set_ranges(model, calibration, found.method if name is None else Method(name))
        reached[name] = sqnr(model, images)
    assert reached[None] == pytest.approx(found.sqnr_db) and max(reached, key=reached.get) is None
    assert reached[None] > max(reached[name] for name in RANGE_METHODS) + 1
    nodes = named_nodes(model)
    assert nodes["keeps._input_quantizer"].amax > 1.5 * nodes["drops._input_quantizer"].amax


@pytest.mark.slow
@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
def test_a_swin_is_never_worse_than_by_one_method(kind, tiny_model):
    model, images = tiny_model(kind, **SMALL), torch.randn(8, 3, 32, 32)
    apply_policy(model, load_policy("ft-mode1").and_then(Rule(nodes=("role:activation",), bits=5)))
    calibration = observe(model, [images], AUTO)
    set_ranges(model, calibration, AUTO)
    context = PassContext(model, [images], AUTO, list_units(model))
    found, again = choose_methods(context, calibration), choose_methods(context, calibration)
    assert found == again and found.pictures == 8 and not found.method.is_auto
    alone = {}
    for name in RANGE_METHODS:
        set_ranges(model, calibration, Method(name))
        alone[name] = sqnr(model, images)
    assert found.singles == pytest.approx(alone)
    set_ranges(model, calibration, found.method)
    assert sqnr(model, images) == pytest.approx(found.sqnr_db) and found.sqnr_db >= max(alone.values())


def test_a_policy_without_enabled_nodes_chooses_nothing(tiny_model):
    model, images = tiny_model(**SMALL), torch.randn(2, 3, 32, 32)
    apply_policy(model, load_policy("float"))
    calibration = observe(model, [images], AUTO)
    set_ranges(model, calibration, AUTO)
    assert not enabled_nodes(model)
    assert choose_methods(PassContext(model, [images], AUTO), calibration) is None
