"""Ridge regression: the augmented least squares problem, and the weights that `gptq` leaves as they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.gptq import GptqOptions, run
from swin_quant.quant.passes.layerwise import ErrorForm, Problem, Rows
from swin_quant.quant.passes.ridge import corrected, ridge
from swin_quant.quant.policy import apply_policy, load_policy

SMALL = {"DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}


@given(st.integers(0, 2**31), st.floats(1e-4, 10))
def test_it_solves_the_augmented_least_squares_problem(seed, damp):
    generator = torch.Generator().manual_seed(seed)
    x, d = (torch.randn(40, 6, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    penalty = damp * x.square().mean() * 40
    rows = torch.cat([x, penalty.sqrt() * torch.eye(6)])
    wanted = torch.cat([d @ weight.T, torch.zeros(6, 4)])
    change = torch.linalg.lstsq(rows, wanted).solution.T
    form = ErrorForm(x.T @ x / 40, d.T @ x / 40)
    assert torch.allclose(ridge(weight, form, damp), change, atol=1e-9)
    left = (d @ weight.T - x @ change.T).square().sum() / 40
    assert form.gain(weight, change) == pytest.approx((d @ weight.T).square().sum().item() / 40 - left.item())


def form_of(x, d):
    return ErrorForm(x.T @ x / len(x), d.T @ x / len(x))


def test_the_shrinkage_follows_the_fit_on_held_out_pictures():
    """Everything if d follows x; almost nothing if d is noise, however few pictures there are to memorise."""
    x, noise = torch.randn(3, 60, 30).double(), 0.3 * torch.randn(3, 60, 30).double()
    weight = torch.randn(4, 30).double()
    for d, most, least in ((0.3 * x, 1.02, 0.9), (noise, 0.3, 0.0)):
        forms = [form_of(x[part].flatten(0, 1), d[part].flatten(0, 1)) for part in (slice(3), slice(2), slice(2, 3))]
        change = corrected(Problem(None, weight, [Rows(torch.ones(4).bool(), *forms)])) - weight
        assert least <= change.norm() / (0.3 * weight).norm() <= most


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 8, 24])
def test_few_pictures_are_split_for_judging_too(count, tiny_model, images):
    """Fewer than four batches: with no judging pictures, weights would silently stay float's."""
    model = tiny_model("swin", **SMALL)
    apply_policy(model, load_policy("qdq").bits("role:activation", 3))
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.named_parameters() if name.endswith("weight")}
    note = run(PassContext(model, images[:count].split(8), units=list_units(model)), GptqOptions())
    assert not note.startswith("0 of ") and "picture" not in note
    assert any(not torch.equal(value, before.get(name, value)) for name, value in model.named_parameters())


def test_inputs_of_zeros_have_no_solution_and_their_unit_is_left_and_named(tiny_model, images, use_policy):
    model = use_policy(tiny_model("swin", **SMALL), "qdq")
    torch.nn.init.zeros_(model.layers[0].blocks[0].norm1.weight)
    torch.nn.init.zeros_(model.layers[0].blocks[0].norm1.bias)
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.layers[0].blocks[0].state_dict().items()}
    note = run(PassContext(model, images.split(4), units=list_units(model)), GptqOptions())
    assert note.endswith("no solution in layers.0.blocks.0")
    assert all(torch.equal(value, before[name]) for name, value in model.layers[0].blocks[0].state_dict().items())


def test_pictures_that_are_not_finite_change_nothing(tiny_model, images, use_policy):
    model = use_policy(tiny_model("swin", **SMALL), "qdq")
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    note = run(PassContext(model, [images[:8] * torch.nan], units=list_units(model)), GptqOptions())
    assert note.startswith("0 of ") and "no solution in" in note
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
