"""Ranges that a GPU finds are those of a CPU, but for the last bits of sums."""

import pytest

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import apply_policy
from swin_quant.quant.quantizer import named_nodes

# Relative. A value that moves by its last bits may fall into the next of 2048 bins, and a search take another of its
# candidates.
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
