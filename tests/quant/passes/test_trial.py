"""A trial of one unit searches its own ranges, with zero points if the policy has them, and leaves none behind."""

import pytest
import torch

from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes.trial import Trial, enabled_in
from swin_quant.quant.passes.units import walk
from tests.helpers.settings import change


@pytest.mark.parametrize("method", [None, "max"])
def test_zero_points_take_from_a_unit_s_error_and_their_ranges_come_back(method, tiny_model, use_policy):
    model, images = tiny_model("swin"), torch.randn(8, 3, 32, 32)
    calibrate(model, [images])
    use_policy(model, "cpu")
    asked = 0
    for run in walk(model, list_units(model), [images], model):
        nodes = [node for node in enabled_in(run.unit) if not node.setting.symmetric]
        if nodes:
            before = [(node.amax, node.bounds) for node in nodes]
            error = Trial(run, method).error()
            assert all(torch.equal(node.amax, amax) and torch.equal(node.bounds, ends)
                       for node, (amax, ends) in zip(nodes, before, strict=True))  # fmt: skip
            for node in nodes:
                change(node, symmetric=True)
            assert 0 < error < Trial(run, method).error()
            asked += 1
        if asked > 1:
            break
    assert asked > 1
