"""Ranges chosen by their unit's output: spoilt ones are repaired, and no unit gets worse."""

import pytest
import torch
from nightly import share

from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.range_search import RangeSearchOptions, run
from swin_quant.quant.passes.trial import quantized, squared_error
from swin_quant.quant.passes.units import entering, through
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import State, named_nodes


@pytest.fixture(scope="module")
def images():
    return torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind, policy", share([("swinv2", "ft-mode1"), ("swin", "qdq"), ("swin", "cpu")], 3))
def test_weights_stay_and_the_first_unit_s_output_for_other_pictures_comes_nearer(kind, policy, small, images):
    """Only the first: later units' inputs change with it, and a random network's logits are no sum of units."""
    model = small(kind)
    apply_policy(model, load_policy(policy).bits("role:gemm_weight", 4).bits("role:activation", 4))
    calibrate(model, images.split(8))
    unit = next(iter(list_units(model).values()))
    inputs = entering(model, unit, [images[32:]])
    expected = through(unit, inputs)
    before = squared_error(quantized(unit, inputs), expected)
    plain = {name: p.clone() for name, p in model.named_parameters()}
    grids = {name: node.grid for name, node in enabled_nodes(model).items()}  # including zero points
    options = RangeSearchOptions(pictures=32, rounds=1)
    note = run(PassContext(model, images[:32].split(8), units=list_units(model)), options)
    assert squared_error(quantized(unit, inputs), expected) < before, note
    assert all(torch.equal(p, plain[name]) for name, p in model.named_parameters())
    assert all(node.state is State.OFF for node in named_nodes(model).values())
    assert {name: node.grid for name, node in enabled_nodes(model).items()} == grids
