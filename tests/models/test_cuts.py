"""Traced networks: their units are their blocks, give the same results alone, and passes run on them."""

import pytest
import torch
from families import family
from torch import nn

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError
from swin_quant.models.registry import list_exchanges, list_units
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.passes.places import rescale

NAMES = ["resnet18", "deit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050"]
LAST = pytest.param(NAMES[-1], marks=pytest.mark.nightly)  # it has all its blocks


@pytest.fixture(scope="module", params=[*NAMES[:-1], LAST])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def images():
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def test_units_are_blocks_and_what_stands_between_them(name):
    units = list(list_units(family(name)))
    blocks = {
        "resnet18": ["layer1.0", "layer2.0", "layer3.0", "layer4.0"],
        "deit_tiny_patch16_224": ["blocks.0", "blocks.1"],
        "convnext_atto": ["stages.1.downsample", "stages.1.blocks.0", "stages.1.blocks.1", "stages.2.downsample"],
        "mobilenetv3_small_050": ["blocks.1.0", "blocks.1.1", "blocks.2.0"],
    }[name]
    first = units.index(blocks[0])
    assert units[first : first + len(blocks)] == blocks


def test_factors_that_move_leave_the_function(name, images):
    model = family(name)
    calibrate(model, [images], Method("max"))  # folds norms
    with torch.no_grad():
        wanted = model(images)
        found = list_exchanges(model)
        assert found, "a norm and its linears, or convolutions with nothing but ReLU between them"
        for exchange in found:
            channels = exchange.before[0].cut(model.get_parameter(exchange.before[0].name)).shape[0]
            rescale(model, exchange, torch.rand(channels) + 0.5)
        torch.testing.assert_close(model(images), wanted, rtol=1e-3, atol=1e-4)


def test_convolutions_are_solved_for_as_the_products_of_patches_that_they_are():
    torch.manual_seed(0)
    model = sq.wrap(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)), 8)
    layer, x = model.module.get_submodule("0"), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        product = layer.columns(x) @ layer.weight.flatten(1).T + layer.bias
        torch.testing.assert_close(product.view(2, 4, 4, 8).permute(0, 3, 1, 2), layer(x))


def test_a_network_that_names_no_units_is_refused_in_a_line():
    from swin_quant.quant.layer import QuantLinear

    model = nn.Sequential(nn.Flatten(), QuantLinear(192, 3))
    with pytest.raises(SwinQuantError, match=r"gptq: .* names no units.*wrap"):
        sq.calibrate(model, [torch.randn(4, 3, 8, 8)], "qdq", passes=["gptq"])


class Residual(nn.Module):
    """x + linear(norm(x))."""

    def __init__(self, affine):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(48, elementwise_affine=affine), nn.Linear(48, 48)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("affine", [True, False])
def test_channels_behind_a_norm_without_parameters_stay_as_they_are(affine):
    """Such a norm cannot take a factor: the pass reports no gain, and does no harm."""
    torch.manual_seed(0)
    block = Residual(affine)
    if affine:
        with torch.no_grad():
            block.norm.weight[:4] *= 100
            block.linear.weight[:, :4] /= 100
    model = sq.wrap(nn.Sequential(nn.Flatten(), block, Residual(affine), nn.Linear(48, 3)), 4)
    before = model.module.get_submodule("1.linear").weight.clone()
    sq.calibrate(model, [torch.randn(8, 3, 4, 4)], "qdq", method="max", passes=["equalize"])
    (done,) = model.card.calibration["passes"]
    assert done["kept"] and done["note"].startswith("no unit gains") is not affine
    assert torch.equal(model.module.get_submodule("1.linear").weight, before) is not affine
