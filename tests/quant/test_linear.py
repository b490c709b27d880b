"""A linear layer's three nodes are where docs/reference, section 1.4 puts them."""

import pytest
import torch
import torch.nn.functional as F

from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.quantizer import State
from tests.helpers.settings import change

NODES = ("_input_quantizer", "_weight_quantizer", "_aftergemm_quantizer")


def rounded(x, amax):
    return torch.clamp(torch.round(x / (amax / 127)), -128, 127) * (amax / 127)


def layer(*on, bias=True):
    made = QuantLinear(5, 3, bias=bias)
    for name in NODES:
        made.get_submodule(name).amax = 0.3
        made.get_submodule(name).state = State.QUANTIZE if name in on else State.OFF
    return made


def close(one, other):
    return torch.allclose(one, other, atol=1e-6)


def test_is_a_plain_linear_with_nodes_off():
    made, x = layer(), torch.randn(4, 5)
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))


@torch.no_grad()
def test_each_node_is_in_its_place():
    x = torch.randn(4, 5)
    made = layer("_input_quantizer")
    assert close(made(x), rounded(x, 0.3) @ made.weight.T + made.bias)
    made = layer("_weight_quantizer")
    assert close(made(x), x @ rounded(made.weight, 0.3).T + made.bias)
    made = layer("_aftergemm_quantizer")
    assert close(made(x), rounded(x @ made.weight.T, 0.3) + made.bias)
    made = layer("_aftergemm_quantizer", bias=False)
    assert close(made(x), rounded(x @ made.weight.T, 0.3))


@torch.no_grad()
@pytest.mark.parametrize("on", [(), NODES])
def test_a_shift_of_the_bias_is_one_of_the_result(on):
    x, shift = torch.randn(4, 5), torch.randn(3)
    made = layer(*on)
    before = made(x)
    made.shift_bias(shift)
    assert close(made(x) - before, shift.expand(4, 3))


def test_product_is_observed_before_the_bias():
    made, seen = layer(), []
    made._aftergemm_quantizer.state, made._aftergemm_quantizer.observer = State.CALIBRATE, seen.append
    x = torch.randn(4, 5)
    result = made(x)
    assert close(seen[0], x @ made.weight.T) and close(result, seen[0] + made.bias)


def test_the_range_in_effect_has_the_granularity_and_the_stored_one_stays():
    made, x = layer("_weight_quantizer"), torch.eye(5)
    node = made._weight_quantizer
    made.weight.data = torch.tensor([[1.0, -2, 0, 0, 0], [0.0] * 5, [0, 0, 0, 0.25, -0.125]])
    node.amax = 1.5
    change(node, granularity="per-channel")
    assert node.range_for(made.weight).tolist() == [[1.5], [1.5], [0.25]], "rows never exceed the stored range"
    with torch.no_grad():
        rows = torch.stack([rounded(row, amax) for row, amax in zip(made.weight, (1.5, 1.5, 0.25), strict=True)])
        assert close(made(x) - made.bias, rows.T)
    assert node.amax == 1.5 and node.amax.shape == ()
    node.amax = torch.tensor([[0.7], [0.3], [0.5]])
    change(node, granularity="per-tensor")
    assert node.range_for(made.weight).shape == () and node.range_for(made.weight) == node.amax.max()
    change(node, granularity="per-channel")
    assert node.range_for(made.weight) is node.amax


@pytest.mark.parametrize("learned", [False, True])
def test_a_range_of_the_right_granularity_is_used_as_it_is(learned):
    node = layer()._weight_quantizer
    if learned:
        node.learn_range()
    assert node.range_for(torch.randn(3, 5)) is node.amax


@pytest.mark.parametrize("stored", [torch.tensor(0.4), torch.tensor([[0.7], [0.3], [0.5]])])
@pytest.mark.parametrize("granularity", ["per-tensor", "per-channel"])
def test_a_derived_range_compiles_and_exports(stored, granularity):
    made, x = layer("_weight_quantizer").eval(), torch.randn(2, 5)
    made._weight_quantizer.amax = stored
    change(made._weight_quantizer, granularity=granularity)
    with torch.no_grad():
        expected = made(x)
        assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(x), expected)
        assert torch.equal(torch.export.export(made, (x,)).module()(x), expected)
