"""Units: together they are the forward pass."""

import pytest
import torch

from swin_quant.models.registry import list_units
from swin_quant.quant.passes.units import entering, walk


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_walk_meets_what_the_network_itself_gives_its_units(kind, tiny_model):
    model, images = tiny_model(kind), torch.randn(5, 3, 32, 32)
    units = list_units(model)
    for run in walk(model, units, images.split(2), model):
        with torch.inference_mode():
            direct = entering(model, run.unit, images.split(2))
        assert all(torch.equal(one, other) for one, other in zip(run.inputs, direct, strict=True))
    assert run.outputs[0].shape[0] == 2


def test_a_unit_that_is_changed_leaves_the_next_its_input(tiny_model):
    model, images = tiny_model("swin"), [torch.randn(2, 3, 32, 32)]
    untouched = [run.inputs[0] for run in walk(model, list_units(model), images, model)]
    changed = []
    for run in walk(model, list_units(model), images, model):
        changed.append(run.inputs[0])
        for parameter in run.unit.parameters():
            parameter.data.zero_()
    assert all(torch.equal(one, other) for one, other in zip(untouched, changed, strict=True))
