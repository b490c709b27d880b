"""Passes after a calibration: the recorded ranges are those of the network that the passes left."""

from dataclasses import dataclass

import pytest
import torch
from pass_contexts import same

from swin_quant.base.distributed import World
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.names import AUTO
from swin_quant.quant.passes import equalize
from swin_quant.quant.passes.kind import Pass
from swin_quant.quant.passes.plan import PassPlan
from swin_quant.quant.passes.recipe import load_passes, steps_of
from swin_quant.quant.passes.state import state_of
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Rule, apply_policy, enabled_nodes
from swin_quant.verbs.calibration_passes import improve, outliers_left
from swin_quant.verbs.calibration_result import CalibrationResult
from tests.outliers import plant


@dataclass(frozen=True)
class Step:
    """A step of a recipe whose pass is not one of ours."""

    kind: Pass
    name: str = "own"
    options: None = None

    def to_dict(self):
        return {"name": self.name}


@torch.no_grad()
def halve(context, options):
    for block in context.units.values():
        if hasattr(block, "norm2"):
            block.norm2.weight.mul_(0.5)
            block.norm2.bias.mul_(0.5)
            block.mlp.fc1.weight.mul_(2)
    return "the same function"


@torch.no_grad()
def spoil(context, options):
    context.model.head.weight.mul_(-1)
    return "spoiled"


HALVE, SPOIL = (Step(Pass(run, type(None), keeps_function=True)) for run in (halve, spoil))


def test_channels_that_stand_out_still_were_not_evened_out_unasked():
    """So a calibration without equalization is made again when equalization is wanted."""
    told = [{"kind": "outliers", "text": "", "nodes": []}]
    assert PassPlan(automatic=True).made([]) and not PassPlan(automatic=True).made([], told)
    assert PassPlan().made([], told)


@pytest.mark.parametrize("steps", [(HALVE, SPOIL), (SPOIL, HALVE)])
def test_one_taken_back_leaves_what_was_seen_behind_the_other(steps, tiny_model, use_policy):
    model = use_policy(tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    first = calibrate(model, [images], Method())
    found, records = improve(model, first, [(0, images)], Method(), PassPlan(steps))
    assert [one["kept"] for one in records] == [step is HALVE for step in steps]
    anew = calibrate(model, [images], Method())
    assert found.largest == anew.largest and found.largest != first.largest


@pytest.mark.slow
def test_calibrator_auto_chooses_in_front_of_a_pass_that_gives_ranges(tiny_model, use_policy):
    """If it chose after the pass, its choice would replace the pass's ranges."""
    given = {}

    def widen(context, options):
        for name, node in enabled_nodes(context.model).items():
            node.amax = node.range * 1.5
            given[name] = node.range.clone()
        return "wider"

    model = use_policy(tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    images, method = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), Method(AUTO)
    found = CalibrationResult(calibrate(model, [images], method), {}, method, [], [(0, images)])
    step = Step(Pass(widen, type(None), keeps_function=True, of_ranges=True, judges_itself=True))
    record = found.improved(model, PassPlan((HALVE, step)), World()).record
    assert [one["kept"] for one in record["passes"]] == [True, True]
    assert all(torch.equal(node.range, given[name]) for name, node in enabled_nodes(model).items())


@pytest.mark.parametrize("least, cured", [(equalize._BETTER, True), (0.0, False)])
def test_what_equalize_does_not_cure_stands_out_still(least, cured, tiny_model, use_policy, monkeypatch):
    """Outliers are reported where equalize found no improvement, and only at enabled nodes: float ones lose nothing by
    them."""
    monkeypatch.setattr(equalize, "_BETTER", least)
    model = use_policy(tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    plant(model, "norms", 100)
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    first = calibrate(model, [images], Method())
    _, records = improve(model, first, [(0, images)], Method(), PassPlan(steps_of(["equalize"])))

    def places():
        return [one.place for one in outliers_left(model, [(0, images)], records, World()) if one.cure]

    assert records[0]["kept"] and (places() == []) is cured
    apply_policy(model, load_policy("qdq").and_then(Rule(disable=("layers.*",))))
    assert not any(place.startswith("layers.") for place in places())


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, AUTO])
def test_a_network_in_training_mode_is_improved_as_out_of_it_and_stays_in_it(name, tiny_model, use_policy):
    images, method = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), Method(name)
    found = []
    for training in (False, True):
        model = tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2], DROP_RATE=0.5, DROP_PATH_RATE=0.5)
        use_policy(model, "qdq").train(training)
        model.layers[0].eval()
        first = CalibrationResult(calibrate(model, [images], method), {}, method, [], [(0, images)])
        found.append((first.improved(model, PassPlan(steps_of(["gptq"])), World()).method, state_of(model)))
        assert model.training is model.layers[1].training is training and not model.layers[0].training
    (method, state), (again, other) = found
    assert method == again and same(state, other)


@pytest.mark.parametrize(
    "nodes, bits, name",
    [("layers.0.blocks.0.mlp.fc1._weight_quantizer", 4, "equalize"), ("role:gemm_weight", 7, "equalize"),
     ("role:gemm_weight", 4, "gptq"), ("role:activation", 4, "ridge")],
)  # fmt: skip
def test_a_recipe_goes_by_the_bits_that_most_nodes_have(tiny_model, tmp_path, nodes, bits, name):
    file = tmp_path / "mine.yaml"
    file.write_text("passes: [equalize]\nbelow_8_bits: [gptq]\nactivations_below_8_bits: [ridge]\n")
    model = tiny_model()
    apply_policy(model, load_policy("qdq").and_then(Rule(nodes=(nodes,), bits=bits)))
    assert [step.name for step in PassPlan.of(load_passes(str(file))).for_model(model).steps] == [name]
