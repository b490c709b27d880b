"""Passes under a float8 policy: weights end on its levels, fixed ranges are not learned, logits get closer."""

import pytest
import torch
from pass_contexts import sqnr

from swin_quant.models.registry import list_exchanges, list_units
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.passes import PassContext, gptq, range_search, reconstruct
from swin_quant.quant.passes.gptq import GptqOptions
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy

LEVELS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
SMALL = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def context(tiny_model):
    model = tiny_model("swin", **SMALL)
    apply_policy(model, load_policy("tensorrt-fp8"))
    calibrate(model, IMAGES.split(8), Method("max"))
    images = list(IMAGES.split(8))
    return PassContext(model, images, units=list_units(model), exchanges=list_exchanges(model))


def fixed_ranges(model):
    return {name: node.amax.item() for name, node in enabled_nodes(model).items() if node.setting.amax is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options", "rounds_weights"),
    [
        (gptq.PASS.run, GptqOptions(pictures=16), True),
        (reconstruct.run, reconstruct.ReconstructOptions(iterations=20, batch=8), True),
        (range_search.run, range_search.RangeSearchOptions(rounds=1), False),
    ],
    ids=["gptq", "reconstruct", "range_search"],
)
def test_a_pass(run, options, rounds_weights, context):
    before, ranges = sqnr(context, IMAGES), fixed_ranges(context.model)
    run(context, options)
    assert fixed_ranges(context.model) == ranges and len(ranges) == 2 and 1.0 not in ranges.values()
    assert sqnr(context, IMAGES) > before - 0.5
    changed = 0
    originals = weighted_layers(context.original)
    for name, layer in weighted_layers(context.model).items():
        if rounds_weights and (node := layer._weight_quantizer).setting.enabled:
            if torch.equal(layer.weight, originals[name].weight):  # in a unit that the pass restored
                continue
            changed += 1
            levels = layer.weight / (node.range_for(layer.weight) / 448)
            nearest = LEVELS[LEVELS.isfinite()].unique()
            assert (levels.detach()[..., None] - nearest).abs().amin(-1).max() < 1e-3, name
    assert bool(changed) == rounds_weights
