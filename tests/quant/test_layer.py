"""Another kind of layer: its own product, and the nodes of every layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.fake_quant import fake_quant, grid
from swin_quant.quant.layer import QuantizedLayer, QuantLinear, weighted_layers
from swin_quant.quant.policy import quantize
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
    assert torch.equal(conv.shift_bias(shift), shift)
    torch.testing.assert_close(conv(x), before + shift[:, None])
    assert linear.effective_bias() is linear.bias


def test_a_layer_without_a_bias_says_that_it_took_nothing():
    linear, x = QuantLinear(3, 2, bias=False), torch.randn(4, 3)
    before = linear(x)
    assert linear.effective_bias() is None
    assert torch.equal(linear.shift_bias(torch.ones(2)), torch.zeros(2))
    assert torch.equal(linear(x), before)
