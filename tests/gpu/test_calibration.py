"""Ranges found on a GPU equal a CPU's, except for the last bits of sums."""

import pytest
from pass_contexts import same

from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.passes import PassContext, range_search
from swin_quant.quant.passes.range_search import RangeSearchOptions
from swin_quant.quant.passes.trial import copy_state
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.quant.quantizer import named_nodes

# Relative. A value that differs in its last bits may fall into the next of 2048 bins, and a search may take another
# candidate.
BOUNDS = {"max": 1e-4, "percentile": 2e-3, "mse": 3e-2, "entropy": 3e-2}


@pytest.mark.parametrize("method", BOUNDS)
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_ranges_are_those_of_a_cpu(gpu, tiny_model, images, kind, method):
    found = []
    for device in (gpu, "cpu"):
        model = tiny_model(kind).to(device)
        apply_policy(model, load_policy("ft-mode1"))
        calibrate(model, [part.to(device) for part in images.split(8)], Method(method))
        nodes = named_nodes(model)
        assert {node.amax.device.type for node in nodes.values()} == {model.head.weight.device.type}
        found.append({name: node.amax.max().item() for name, node in nodes.items()})
    ours, theirs = found
    far = {name: abs(ours[name] / theirs[name] - 1) for name in theirs}
    worst = max(far, key=far.get)
    print(f"{kind} {method}: largest relative difference of a range {far[worst]:.2g}, {worst}")
    assert far[worst] <= BOUNDS[method]


@pytest.mark.parametrize("together", [False, True])
def test_a_search_of_ranges_is_repeated_exactly(gpu, tiny_model, images, together):
    options = RangeSearchOptions(pictures=8, rounds=1, together=together)

    def searched():
        model = tiny_model("swin").to(gpu)
        apply_policy(model, load_policy("qdq").bits("role:gemm_weight", 4))
        parts = [part.to(gpu) for part in images.split(8)]
        calibrate(model, parts)
        context = PassContext(model, parts, units=list_units(model))
        range_search.run(context, options)
        return copy_state(model)

    first, other = searched(), searched()
    assert {value.device.type for value in other.values()} == {gpu.type}
    assert same(other, first)
