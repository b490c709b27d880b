"""Ranges chosen by their unit's output: spoilt ones are repaired, and no unit gets worse."""

from dataclasses import replace

import pytest
import torch
from pass_contexts import assert_goes_on

from swin_quant.models.registry import units_of
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import PassContext, range_search
from swin_quant.quant.passes.range_search import RangeSearchOptions, run
from swin_quant.quant.passes.trial import quantized, squared_error
from swin_quant.quant.passes.units import entering, through
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import State, named_nodes

SHORT = RangeSearchOptions(pictures=32, rounds=1)


@pytest.fixture(scope="module")
def images():
    return torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def calibrated(small, images):
    def make(kind, policy="qdq", bits=4):
        model = small(kind)
        apply_policy(model, load_policy(policy).bits("role:gemm_weight", bits).bits("role:activation", bits))
        calibrate(model, images.split(8))
        return model

    return make


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind, policy", [("swin", "qdq"), ("swinv2", "ft-mode1"), ("swin", "cpu")])
def test_weights_stay_and_the_first_unit_s_output_for_other_pictures_comes_nearer(
    kind, policy, together, calibrated, images
):
    """Only the first: later units' inputs change with it, and a random network's logits are no sum of units."""
    model = calibrated(kind, policy)
    unit = next(iter(units_of(model).values()))
    inputs = entering(model, unit, [images[32:]])
    expected = through(unit, inputs)
    before = squared_error(quantized(unit, inputs), expected)
    plain = {name: p.clone() for name, p in model.named_parameters()}
    grids = {name: node.grid for name, node in enabled_nodes(model).items()}  # including zero points
    note = run(PassContext(model, images[:32].split(8), units=units_of(model)), replace(SHORT, together=together))
    assert squared_error(quantized(unit, inputs), expected) < before, note
    assert all(torch.equal(p, plain[name]) for name, p in model.named_parameters())
    assert all(node.state is State.OFF for node in named_nodes(model).values())
    assert {name: node.grid for name, node in enabled_nodes(model).items()} == grids


@pytest.mark.slow
def test_one_that_was_cut_off_goes_on_at_its_unit_and_gives_the_same_bits(
    calibrated, images, tmp_path, monkeypatch, caplog
):
    def make_context(**more):
        model = calibrated("swin", "cpu")
        return PassContext(model, images[:16].split(8), units=units_of(model), **more)

    caplog.set_level("INFO")
    assert_goes_on(range_search, "search_ranges", make_context, SHORT, tmp_path, monkeypatch)
    assert "2 of " in caplog.text
