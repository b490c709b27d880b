"""Block reconstruction: its gain, its traces and its soft rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import share
from pass_contexts import same, sqnr

from swin_quant.quant.fake_quant import grid, quantize_dequantize
from swin_quant.quant.layer import QuantLinear, weighted_layers
from swin_quant.quant.passes import reconstruct
from swin_quant.quant.passes.reconstruct import (
    ReconstructOptions,
    Rounding,
    make_rounding,
    random_mask,
    run,
    undecided,
    with_mirrored,
)
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import State, named_nodes
from tests.helpers.settings import change

SHORT = ReconstructOptions(iterations=6, batch=8)


@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
def test_logits_of_other_pictures_come_nearer_to_float(kind, make_context, images):
    context = make_context(kind, bits=3, pictures=24)
    before = sqnr(context, images[24:])
    note = run(context, ReconstructOptions(iterations=30, batch=8))
    assert sqnr(context, images[24:]) > before + 1, note
    assert "units gain" in note and "finite" not in note


def test_a_picture_and_its_mirror_image_teach_both_or_judge_both():
    images = torch.randn(24, 3, 4, 4)
    batches = with_mirrored(images.split(8))
    rows = torch.cat(batches)
    assert [len(batch) for batch in batches] == [8] * 6
    assert torch.equal(rows[::2], images) and torch.equal(rows[1::2].flip(3), images)
    teaching, judging = rows[:-12], rows[-12:]
    assert not any(torch.equal(x.flip(-1), y) for x in teaching for y in judging)


@pytest.mark.parametrize("pictures", [2, 6, 10])
def test_nothing_is_judged_by_the_mirror_image_of_what_taught(pictures, make_context, monkeypatch):
    seen = []

    monkeypatch.setattr(reconstruct, "train_unit", lambda unit, targets, *rest: seen.append(targets))
    run(make_context(pictures=pictures), SHORT)
    for targets in seen:
        rows = list(targets.training), list(targets.judging)
        taught, judged = ({row // 2 for row in each} for each in rows)  # a picture, then its mirror image
        assert len(rows[0]) + len(rows[1]) == 2 * pictures and taught and judged and not taught & judged
    assert seen


@pytest.mark.parametrize("policy", ["qdq", "ft-mode1", "cpu"])
def test_weights_end_on_their_grids_and_ranges_keep_their_kind(policy, make_context):
    context = make_context(policy=policy)
    zero_points = {name: node.grid for name, node in enabled_nodes(context.model).items()}
    before = context.original.state_dict()
    run(context, SHORT)
    changed = 0
    for name, layer in weighted_layers(context.model).items():
        node = layer._weight_quantizer
        changed += not torch.equal(layer.weight, before[name.replace("_weight_quantizer", "weight")])
        if node.setting.enabled and not torch.equal(layer.weight, before[name.replace("_weight_quantizer", "weight")]):
            assert torch.equal(
                quantize_dequantize(layer.weight, node.range_for(layer.weight), *node.grid), layer.weight
            )
            assert node.amax.dim() == (2 if policy != "ft-mode1" else 0)
    assert changed
    for name, node in named_nodes(context.model).items():
        assert node.state is State.OFF and not isinstance(node.amax, torch.nn.Parameter)
        assert not node.setting.enabled or node.grid == zero_points[name]


def test_a_unit_that_is_no_better_stays_what_it_was(make_context, monkeypatch):
    context = make_context()
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    monkeypatch.setattr(reconstruct, "train_unit", lambda unit, *others: [p.data.mul_(1.5) for p in unit.parameters()])
    assert run(context, SHORT).startswith("0 of ")
    assert same(context.model.state_dict(), before)


def test_a_unit_whose_loss_is_not_finite_stays_and_is_named(make_context, monkeypatch):
    context = make_context()
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    monkeypatch.setattr("swin_quant.quant.passes.reconstruct._FLOAT_RATE", float("nan"))
    note = run(context, SHORT)
    assert "not finite" in note and next(iter(context.units)) in note
    assert same(context.model.state_dict(), before)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.95])
def test_random_masks_have_the_given_share(share):
    generator = torch.Generator().manual_seed(0)
    mask = random_mask(torch.Size((50, 401)), share, generator)
    assert mask.shape == (50, 401) and mask.double().mean().item() == pytest.approx(share, abs=0.02)


SEEDS, BITS = st.integers(0, 10_000), st.integers(2, 8)


def weight_of(seed, scale=1.0):
    return scale * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))


def largest(weight, by_row):
    return weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()


@given(SEEDS, BITS, st.booleans(), st.booleans())
def test_it_starts_at_the_float_weight(seed, bits, by_row, narrow):
    weight = weight_of(seed)
    amax = largest(weight, by_row)
    soft = Rounding.from_weight(weight, amax, *grid(bits, narrow)).soft()
    assert torch.allclose(soft, weight, atol=1e-5 * amax.max())


@given(SEEDS, BITS, st.booleans(), st.floats(0.2, 1.0), st.integers(-8, 8))
def test_it_ends_on_the_grid_within_a_step_of_the_nearest_level(seed, bits, by_row, share, drift):
    weight = weight_of(seed)
    amax, ends = share * largest(weight, by_row), grid(bits)
    rounding = Rounding.from_weight(weight, amax, *ends)
    rounding.variable.add_(drift * weight_of(seed + 1))
    hard = rounding.hard()
    assert torch.equal(quantize_dequantize(hard, amax, *ends), hard)
    nearest = quantize_dequantize(weight, amax, *ends)
    assert ((hard - nearest).abs() <= amax / ends[1] * (1 + 1e-5)).all()


def test_the_pull_is_nothing_at_levels_and_reaches_farther_the_less_steep_it_is():
    assert undecided(torch.tensor([-9.0, 9.0, 9.0]), 4.0).item() == pytest.approx(0, abs=1e-4)
    assert undecided(torch.zeros(2), 4.0).item() == pytest.approx(2)
    slopes = []
    for steepness in (20.0, 2.0):
        variable = torch.tensor([0.34], requires_grad=True)  # a share of 0.6
        undecided(variable, steepness).backward()
        slopes.append(-variable.grad.item())
    assert 0 <= slopes[0] < 1e-6 < slopes[1]


def test_a_range_that_was_chosen_with_the_weight_stays():
    layer = QuantLinear(7, 5)
    node = layer._weight_quantizer
    change(node, bits=4, granularity="per-channel")
    node.amax = torch.full((5, 1), 0.9)
    layer.weight.data = quantize_dequantize(weight_of(3), node.amax, -8, 7)
    assert torch.equal(make_rounding(layer).amax, node.amax)
    layer.weight.data = weight_of(3)  # not on any grid: clipping a little costs less than coarse steps
    node.amax = weight_of(3).abs().max()
    found = make_rounding(layer)
    rough = quantize_dequantize(layer.weight.data, largest(layer.weight.data, True), -8, 7)
    assert found.amax.shape == (5, 1)
    assert (found.hard() - layer.weight.data).norm() < (rough - layer.weight.data).norm()
