"""GPTQ: the ridge regression behind it, rounding as in the textbook, and weights that stay on their nodes' grids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import share
from pass_contexts import decibels, logits

from swin_quant.checkpoint import load_calibrated, save_calibrated
from swin_quant.models.registry import list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.fake_quant import fake_quant
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.gptq import (
    ErrorForm,
    GptqOptions,
    Rows,
    corrected,
    gptq,
    nearest_where_better,
    ridge,
    run,
)
from swin_quant.quant.passes.recipe import parse_steps
from swin_quant.quant.passes.run import run_passes
from swin_quant.quant.policy import Rule, apply_policy, enabled_nodes, load_policy

SMALL = {"DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
FORMATS = [("qdq", 4, 4), ("qdq", 2, 8), ("ft-mode1", 8, 8), ("ft-mode1", 4, 8)]


@pytest.fixture
def images():
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(7))


def ready(model, images, policy="qdq", weights=4, activations=4, narrow=False):
    """The calibrated model under its policy, and the context of passes."""
    bits = load_policy(policy).bits("role:gemm_weight", weights).bits("role:activation", activations)
    apply_policy(model, bits.and_then(Rule(nodes=("role:gemm_weight",), narrow_range=True)) if narrow else bits)
    calibrate(model, images.split(8))
    return PassContext(model, images.split(4), units=list_units(model))


def on_grid(layer):
    node = layer._weight_quantizer
    return torch.equal(fake_quant(layer.weight.detach(), node.range_for(layer.weight), *node.grid), layer.weight)


@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
@pytest.mark.parametrize("policy, weights, activations", share(FORMATS, 4))
def test_weights_lie_on_the_grid_and_stay_there_in_a_file(
    kind, policy, weights, activations, tiny_model, images, tmp_path
):
    """The original, and the ranges of activations, stay."""
    model = tiny_model(kind, **SMALL)
    context = ready(model, images, policy, weights, activations, narrow=weights == 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = parse_steps([{"name": "gptq", "pictures": 16}])
    _, (record,) = run_passes(context, steps, None, lambda: pytest.fail("ranges are not observed again"))
    assert record["kept"] and not record["note"].startswith("0 of")
    assert all(torch.equal(value, before[name]) for name, value in context.original.state_dict().items())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert all(name.endswith(("weight", "bias", "_weight_quantizer._amax")) for name in changed)
    layers = {name.replace("_weight_quantizer", "weight"): layer for name, layer in weighted_layers(model).items()}
    changed &= layers.keys()
    assert len(changed) > 3 and all(on_grid(layers[name]) for name in changed)
    save_calibrated(model, tmp_path / "x.pth")
    again = tiny_model(kind, seed=1, **SMALL)
    apply_policy(again, load_policy(policy))
    for name, node in enabled_nodes(model).items():
        again.get_submodule(name).setting = node.setting
    load_calibrated(again, tmp_path / "x.pth")
    assert torch.equal(logits(again, images), logits(model, images))


@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
def test_logits_come_nearer_to_float_on_other_pictures(kind, tiny_model, images):
    model, other = tiny_model(kind, **SMALL), torch.randn(16, 3, 32, 32)
    with torch.inference_mode():
        expected = model(other)
    context = ready(model, images)
    rough = decibels(logits(model, other), expected)
    run_passes(context, parse_steps(["gptq"]), None, lambda: None)
    assert decibels(logits(model, other), expected) > rough + 1


SEEDS = st.integers(0, 2**31)


def problem(seed, rows=5, columns=12, mixing=1.0):
    """float64 weight [rows, columns] and a covariance of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    parts = ((3 * columns, columns), (columns, columns), (rows, columns))
    inputs, mixed, weight = (torch.randn(*one, generator=generator, dtype=torch.float64) for one in parts)
    inputs = inputs @ (torch.eye(columns) + mixing * mixed)
    hessian = inputs.T @ inputs / len(inputs)
    return weight, hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)


def row_errors(difference, hessian):
    """d H d^T for every row d of `difference` [out, in]."""
    return (difference @ hessian * difference).sum(1)


def scales(weight, qmax):
    return weight.abs().amax(1, keepdim=True) / qmax


@given(SEEDS, st.integers(2, 8), st.integers(1, 30), st.floats(0, 3))
def test_no_row_is_worse_than_rounded_to_nearest(seed, bits, columns, mixing):
    weight, hessian = problem(seed, columns=columns, mixing=mixing)
    qmax = 2 ** (bits - 1) - 1
    scale = scales(weight, qmax)
    found = nearest_where_better(gptq(*(mine := (weight, hessian, scale, -qmax - 1, qmax))), *mine)
    assert found.min() >= -qmax - 1 and found.max() <= qmax and torch.equal(found, found.round())
    plain = (weight / scale).round().clamp(-qmax - 1, qmax)
    errors = [row_errors(weight - levels * scale, hessian) for levels in (found, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all()


@pytest.mark.parametrize("block", [1, 5, 128])
def test_it_is_the_textbook_s_with_an_inverse_for_each_column(block, monkeypatch):
    monkeypatch.setattr("swin_quant.quant.passes.gptq.BLOCK", block)
    weight, hessian = problem(3)
    scale = scales(weight, 7)
    rest, left, expected = weight.clone(), hessian.diagonal().argsort(descending=True).tolist(), torch.zeros(5, 12)
    while left:
        inverse = torch.linalg.inv(hessian[left][:, left])
        level = (rest[:, left[0]] / scale[:, 0]).round().clamp(-8, 7)
        error = (rest[:, left[0]] - level * scale[:, 0]) / inverse[0, 0]
        rest[:, left] -= torch.outer(error, inverse[0])
        expected[:, left.pop(0)] = level.float()
    assert torch.equal(gptq(weight, hessian, scale, -8, 7).float(), expected)


def test_a_singular_hessian_is_refused():
    weight, _ = problem(0)
    with pytest.raises(torch.linalg.LinAlgError):
        gptq(weight, torch.zeros(12, 12).double(), scales(weight, 7), -8, 7)


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
        change = corrected(weight, [Rows(torch.ones(4).bool(), *forms)]) - weight
        assert least <= change.norm() / (0.3 * weight).norm() <= most


@pytest.mark.parametrize("count", [2, 24])
def test_few_pictures_are_split_for_judging_too(count, tiny_model, images):
    """Fewer than four batches: with no judging pictures, weights would silently stay float's."""
    model = tiny_model("swin", **SMALL)
    apply_policy(model, load_policy("qdq").bits("role:activation", 3))
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.named_parameters() if name.endswith("weight")}
    note = run(PassContext(model, images[:count].split(8), units=list_units(model)), GptqOptions())
    assert not note.startswith("0 of ") and "picture" not in note
    assert any(not torch.equal(value, before.get(name, value)) for name, value in model.named_parameters())


@pytest.mark.parametrize(("damage", "left"), [("zeros", "layers.0.blocks.0"), ("NaN", "")])
def test_inputs_without_a_solution_leave_their_unit_and_name_it(damage, left, tiny_model, images, use_policy):
    model = use_policy(tiny_model("swin", **SMALL), "qdq")
    if damage == "zeros":
        torch.nn.init.zeros_(model.layers[0].blocks[0].norm1.weight)
        torch.nn.init.zeros_(model.layers[0].blocks[0].norm1.bias)
    calibrate(model, images.split(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pictures = images if damage == "zeros" else images[:8] * torch.nan
    note = run(PassContext(model, pictures.split(4), units=list_units(model)), GptqOptions())
    assert f"no solution in {left}" in note and note.startswith("0 of ") is (damage == "NaN")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name.startswith(left))
