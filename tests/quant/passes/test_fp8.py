"""Passes under a float8 policy: weights end on its levels, fixed ranges are not learned, logits get closer."""

import pytest
import torch
from pass_contexts import sqnr

from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.passes import gptq, range_search, reconstruct
from swin_quant.quant.passes.gptq import GptqOptions
from swin_quant.quant.policy import enabled_nodes

LEVELS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def fixed_ranges(model):
    return {name: node.amax.item() for name, node in enabled_nodes(model).items() if node.setting.amax is not None}


@pytest.mark.parametrize(
    ("run", "options", "rounds_weights"),
    [
        (gptq.PASS.run, GptqOptions(pictures=16), True),
        (reconstruct.run, reconstruct.ReconstructOptions(iterations=20, batch=8), True),
        (range_search.run, range_search.RangeSearchOptions(rounds=1), False),
    ],
    ids=["gptq", "reconstruct", "range_search"],
)
def test_a_pass(run, options, rounds_weights, make_context, images):
    context = make_context(policy="tensorrt-fp8", bits=8)
    before, ranges = sqnr(context, images[:16]), fixed_ranges(context.model)
    run(context, options)
    assert fixed_ranges(context.model) == ranges and len(ranges) == 2 and 1.0 not in ranges.values()
    assert sqnr(context, images[:16]) > before - 0.5
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
