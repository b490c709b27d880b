"""Passes: a harmful one is taken back, unless it measured the logits itself; and what all that learn have in common."""

import pytest
import torch
from pass_contexts import Step, same, sqnr

from swin_quant.models.registry import list_exchanges, list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.recipe import parse_steps
from swin_quant.quant.passes.run import run_passes


@torch.no_grad()
def spoil(context, options):
    context.model.head.weight.mul_(-1)
    return "spoiled"


@pytest.mark.parametrize("judges_itself", [False, True])
def test_harm_is_taken_back_where_nobody_else_judged(judges_itself, tiny_model, use_policy):
    model = use_policy(tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    calibrate(model, [images])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = Step(Pass(spoil, type(None), judges_itself=judges_itself))
    _, (record,) = run_passes(PassContext(model, [images], units=list_units(model)), [step], None, lambda: None)
    assert record["kept"] is judges_itself and record["sqnr_db"][1] < record["sqnr_db"][0] - 1
    assert same(model.state_dict(), before) is not judges_itself


@pytest.mark.parametrize("name", ["equalize", "gptq", "range_search", "reconstruct"])
def test_a_unit_that_is_not_finite_is_left_as_it_was_and_named(name, tiny_model, use_policy):
    """The last one: all others are as without it."""
    model = use_policy(tiny_model("swin", EMBED_DIM=16, DEPTHS=[1, 1], NUM_HEADS=[1, 2]), "qdq")
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    calibrate(model, [images])
    unit = model.layers[1].blocks[0]
    torch.nn.init.constant_(unit.mlp.fc2.bias, torch.inf)
    before = {name: value.clone() for name, value in unit.state_dict().items()}
    context = PassContext(model, [images], units=list_units(model), exchanges=list_exchanges(model))
    (step,) = parse_steps([{"name": name, "iterations": 1} if name == "reconstruct" else name])
    assert step.kind.run(context, step.options).endswith("; not finite, and left as they were: layers.1.blocks.0")
    assert same(unit.state_dict(), before)


@pytest.mark.parametrize("pictures", [torch.zeros(3, 3, 32, 32), torch.ones(1, 3, 32, 32)])
@pytest.mark.parametrize(("name", "iterations", "lost"), [("distill", 2, 0.1), ("reconstruct", 3, 0.6)])
def test_one_picture_and_constant_ones_do_no_harm(name, iterations, lost, pictures, small, use_policy):
    """Of reconstruction, a loss of more than half a dB is taken back."""
    model = use_policy(small(), "ft-mode1")
    calibrate(model, [pictures])
    context = PassContext(model, [pictures], units=list_units(model))
    before = sqnr(context, pictures)
    run_passes(context, parse_steps([{"name": name, "iterations": iterations}]), None, lambda: None)
    assert sqnr(context, pictures) > before - lost


@pytest.mark.parametrize(
    ("name", "iterations", "pictures"),
    [("distill", 1, 24), pytest.param("reconstruct", 4, 16, marks=pytest.mark.nightly)],
)
def test_a_seed_gives_the_same_bits_and_another_one_others(name, iterations, pictures, make_context):
    states = []
    for seed in (0, 0, 1):
        context = make_context(pictures=pictures)
        (step,) = parse_steps([{"name": name, "iterations": iterations, "batch": 8, "seed": seed}])
        step.kind.run(context, step.options)
        states.append(context.model.state_dict())
    assert same(states[0], states[1]) and not same(states[0], states[2])
