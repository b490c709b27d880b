"""Layers: their product, where their nodes are (docs/reference, section 1.4), and factors channel by channel."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.fake_quant import fake_quant, grid
from swin_quant.quant.layer import ChannelFactors, QuantizedLayer, QuantLinear, made_factors, weighted_layers
from swin_quant.quant.passes.trial import copy_state, give_state
from swin_quant.quant.policy import quantize
from swin_quant.quant.quantizer import State
from tests.helpers.settings import change


class QuantConv1d(QuantizedLayer, nn.Conv1d):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.add_nodes()

    def product(self, x, weight, bias=None):
        return F.conv1d(x, weight, bias)

    def aligned(self, bias):
        return bias[:, None]


@pytest.fixture
def model():
    return nn.Sequential(QuantConv1d(2, 3, 4), nn.ReLU(), nn.Flatten(), QuantLinear(15, 5))


@pytest.mark.parametrize("after", [False, True])
def test_it_quantizes_what_goes_in_the_weight_and_the_product_before_the_bias(model, after):
    conv, x = model[0], torch.randn(7, 2, 8)
    calibrate(model, [x], Method("max"))
    for node in (conv._input_quantizer, conv._weight_quantizer, conv._aftergemm_quantizer):
        change(node, enabled=after or node is not conv._aftergemm_quantizer)
    change(conv._weight_quantizer, granularity="per-channel")
    quantize(model)

    def rounded(tensor, amax):
        return fake_quant(tensor, amax, *grid(8))

    weight = rounded(conv.weight, conv.weight.abs().amax((1, 2), keepdim=True))
    product = F.conv1d(rounded(x, x.abs().max()), weight)
    if after:
        product = rounded(product, conv._aftergemm_quantizer.amax)
    torch.testing.assert_close(conv(x), product + conv.bias[:, None])


def test_layers_are_found_by_their_weight_nodes_whatever_their_kind(model):
    assert weighted_layers(model) == {"0._weight_quantizer": model[0], "3._weight_quantizer": model[3]}
    assert list(weighted_layers(model[3])) == ["_weight_quantizer"]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_a_shift_of_the_bias_moves_what_comes_out_by_as_much(model):
    conv, linear, x = model[0], model[3], torch.randn(7, 2, 8)
    before, shift = conv(x), torch.tensor([1.0, -2.0, 0.5])
    conv.shift_bias(shift)
    torch.testing.assert_close(conv(x), before + shift[:, None])
    assert linear.effective_bias() is linear.bias


def rounded(x, amax):
    return torch.clamp(torch.round(x / (amax / 127)), -128, 127) * (amax / 127)


def test_the_range_in_effect_has_the_granularity_and_the_stored_one_stays():
    made, x = QuantLinear(5, 3), torch.eye(5)
    node = made._weight_quantizer
    node.state = State.QUANTIZE
    made.weight.data = torch.tensor([[1.0, -2, 0, 0, 0], [0.0] * 5, [0, 0, 0, 0.25, -0.125]])
    node.amax = 1.5
    change(node, granularity="per-channel")
    assert node.range_for(made.weight).tolist() == [[1.5], [1.5], [0.25]], "rows never exceed the stored range"
    with torch.no_grad():
        rows = torch.stack([rounded(row, amax) for row, amax in zip(made.weight, (1.5, 1.5, 0.25), strict=True)])
        torch.testing.assert_close(made(x) - made.bias, rows.T)
    assert node.amax == 1.5 and node.amax.shape == ()
    node.amax = torch.tensor([[0.7], [0.3], [0.5]])
    change(node, granularity="per-tensor")
    assert node.range_for(made.weight).shape == () and node.range_for(made.weight) == node.amax.max()
    change(node, granularity="per-channel")
    assert node.range_for(made.weight) is node.amax


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(3, 3), ChannelFactors(3))


def test_a_checkpoint_brings_them_and_one_without_takes_them_away(net):
    plain = {key: value.clone() for key, value in net.state_dict().items()}
    net[1].give(torch.rand(3))
    own = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(plain)
    assert not made_factors(net)
    net.load_state_dict(own)
    assert torch.equal(net[1].weight, own["1.weight"])


def test_copied_states_restore_factors(net):
    before = copy_state(net)
    net[1].give(torch.rand(3))
    after = copy_state(net)
    give_state(net, before)
    assert not made_factors(net)
    give_state(net, after)
    assert torch.equal(net[1].weight, after["1.weight"])
