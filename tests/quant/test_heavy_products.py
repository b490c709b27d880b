"""Planted products: one channel is far from the others, and the float network computes nearly the same."""

import pytest
import torch
from pass_contexts import logits

from swin_quant.quant.calibration import calibrate
from swin_quant.quant.check import agreement_and_sqnr
from swin_quant.quant.watch import watching
from tests.heavy_products import plant_in_merging, plant_in_mlp

IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def given_and_gives(model, layer):
    """Inputs and outputs, [tokens, channels] each."""
    seen = []
    with torch.inference_mode(), watching({"": layer}, lambda name, layer, inputs, y: seen.extend([inputs[0], y])):
        logits = model(IMAGES)
    return *(x.flatten(0, -2).clone() for x in seen), logits


def worth(model, policy, use_policy):
    """SQNR of the logits in dB under a policy."""
    use_policy(model, policy)
    calibrate(model, IMAGES.split(8))
    return agreement_and_sqnr(logits(model, IMAGES), model(IMAGES).detach())[1]


@pytest.fixture
def model(tiny_model):
    return tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2])


def test_a_product_of_fc2_that_is_far_from_the_others_costs_mode_1_alone(model, use_policy):
    mlp = model.layers[1].blocks[0].mlp
    given, _, expected = given_and_gives(model, mlp.fc2)
    plant_in_mlp(mlp, given, 0.5)
    _, _, logits = given_and_gives(model, mlp.fc2)
    assert agreement_and_sqnr(logits, expected)[1] > 15
    assert worth(model, "ft-mode1", use_policy) < worth(model, "ft-mode2", use_policy) - 6


def test_a_channel_of_patch_merging_is_constant_and_the_network_hardly_sees_it(model):
    merging = model.layers[0].downsample
    _, product, expected = given_and_gives(model, merging.reduction)
    largest = merging.reduction.weight.abs().max().item()
    plant_in_merging(merging, model.layers[1].blocks[0], product, 5)
    _, planted, logits = given_and_gives(model, merging.reduction)
    (at,) = (planted.std(0) < 1e-3).nonzero().flatten().tolist()
    assert planted[:, at].mean().item() == pytest.approx(5 * product.abs().max().item(), rel=1e-3)
    others = [channel for channel in range(product.shape[1]) if channel != at]
    assert torch.allclose(planted[:, others], product[:, others], atol=1e-3)
    assert merging.reduction.weight.abs().max().item() <= largest * 1.0001
    assert agreement_and_sqnr(logits, expected)[1] > 20
