"""Equalization: factors in closed form, the float network's function, planted outliers."""

import copy

import pytest
import torch
from nightly import share
from torch import nn

import swin_quant as sq
from swin_quant.models.registry import list_exchanges, list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.layer import made_factors
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import EqualizeOptions, factors, outlier_channels, run
from swin_quant.quant.passes.places import rescale
from swin_quant.quant.policy import quantizing
from tests.helpers.pass_contexts import decibels
from tests.outliers import plant

PLACES = [("swin", "norms"), ("swin", "v"), ("swin", "qk"), ("swinv2", "v"), ("swinv2", "heads"), ("swinv2", "stream")]
SHALLOW = {"DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}


@pytest.fixture
def shallow(tiny_model):
    """A block and a patch merging, and a block: three units."""
    return lambda kind: tiny_model(kind, **SHALLOW)


@pytest.fixture
def images():
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def context_of(model, images):
    return PassContext(model, images.split(8), units=list_units(model), exchanges=list_exchanges(model))


@torch.inference_mode()
def logits(model, images):
    return model(images)


def worth(model, images, expected):
    calibrate(model, images.split(8))
    with quantizing(model):
        return decibels(logits(model, images), expected)


def test_factors_balance_both_sides_at_half_strength():
    size, other = torch.tensor([8.0, 2.0, 0.5]), torch.tensor([0.5, 2.0, 8.0])
    found = factors(size, other, 0.5, relative=False)
    assert torch.allclose(size / found, other * found, rtol=1e-2)


def outliers(context):
    """The size of outlier channels by the module that shows them."""
    return {one.place: one.times for one in outlier_channels(context)}


@pytest.mark.parametrize("kind, where", PLACES)
def test_planted_outliers_keep_the_function_and_are_found(kind, where, shallow, images, use_policy):
    model = shallow(kind)
    clean = outliers(context_of(model, images))
    before = logits(model, images)
    plant(model, where, 100)
    assert torch.allclose(logits(model, images), before, atol=1e-3)
    found = outliers(context_of(model, images))
    assert max(found.values(), default=0) > 10 * max([*clean.values(), 1])


@pytest.mark.parametrize(
    "kind, where, share",
    [
        ("swin", "norms", 0.03),
        ("swin", "v", 0.03),
        ("swin", "qk", 0.03),
        ("swin", "qk", 1.0),
        ("swinv2", "v", 0.03),
        ("swinv2", "heads", 1.0),
    ],
)
def test_channels_that_are_too_small_are_found_by_what_reads_or_answers_them(kind, where, share, shallow, images):
    model = shallow(kind)
    plant(model, where, 1 / 100, share)
    found = outliers(context_of(model, images))
    in_first_block = [times for name, times in found.items() if name.startswith("layers.0.blocks.0.")]  # only one head
    assert max(in_first_block, default=0) > 10


def test_all_of_v_is_brought_to_the_level_of_q_and_k(shallow, images, use_policy):
    model = use_policy(shallow("swin"), "ft-mode1")
    expected = logits(model, images)
    unplanted = worth(model, images, expected)
    plant(model, "v", 64, share=1.0)
    planted = worth(model, images, expected)
    run(context_of(model, images), EqualizeOptions(only_outliers=True))
    assert torch.allclose(logits(model, images), expected, atol=1e-3)
    assert planted < unplanted - 3 and worth(model, images, expected) > unplanted - 1


@pytest.mark.parametrize("kind, where", share(PLACES, len(PLACES)))
def test_planted_outliers_are_cured_in_the_same_function(kind, where, shallow, images, use_policy):
    model = use_policy(shallow(kind), "ft-mode1")
    expected = logits(model, images)
    unplanted = worth(model, images, expected)
    plant(model, where, 100)
    planted = worth(model, images, expected)
    run(context_of(model, images), EqualizeOptions(only_outliers=True))
    assert torch.allclose(logits(model, images), expected, atol=1e-3)
    cured = worth(model, images, expected)
    assert planted < unplanted - 5 and cured > unplanted - 1.5


@pytest.mark.parametrize("row", share(range(3), 3))
def test_rows_that_are_too_large_do_not_pass_for_channels_of_the_stream_that_they_read(
    row, shallow, images, use_policy
):
    model = use_policy(shallow("swinv2"), "ft-mode1")
    blocks = [block for layer in model.layers for block in layer.blocks]
    with torch.no_grad():
        for attn in (block.attn for block in blocks):
            v = attn.qkv.weight[-len(attn.v_bias) :][row]
            v[3] = 3 * v.abs().max()
            v *= 100
            attn.v_bias[row] *= 100
            attn.proj.weight[:, row] /= 100
    adding = {name: value.clone() for name, value in model.named_parameters() if "norm" in name}
    before = [block.attn.qkv.weight.detach().abs().max() for block in blocks]
    note = run(context_of(model, images), EqualizeOptions(only_outliers=True))
    assert "streams" not in note
    assert all(block.attn.qkv.weight.abs().max() < most / 4 for block, most in zip(blocks, before, strict=True))
    assert all(torch.equal(value, adding[name]) for name, value in model.named_parameters() if name in adding)


def test_a_residual_stream_is_evened_out_and_its_last_stage_is_left(shallow, images, use_policy):
    model = use_policy(shallow("swinv2"), "ft-mode1")
    plant(model, "stream", 100)
    expected, maps = logits(model, images), {}
    for stage, layer in enumerate(model.layers):
        layer.blocks[-1].register_forward_hook(lambda m, i, y, at=stage: maps.setdefault(at, []).append(y))
    logits(model, images)
    note = run(context_of(model, images), EqualizeOptions(only_outliers=True))
    assert note.startswith("residual streams gain")
    assert torch.allclose(logits(model, images), expected, atol=1e-3)
    before, after = ((each := y.abs().amax((0, 1))).max() / each.median() for y in (maps[0][0], maps[0][-1]))
    assert before > 30 and after < 8
    assert torch.allclose(maps[1][0], maps[1][-1], atol=1e-3) and not made_factors(model)


def test_the_last_stage_is_evened_out_where_a_multiplication_more_is_no_matter(shallow, images, use_policy):
    model = use_policy(shallow("swinv2"), "qdq")
    with torch.no_grad():
        model.layers[-1].blocks[0].norm1.weight[3] *= 30
        model.head.weight[:, 3] = 0  # its own content must not count, only its size's cost to others
    expected = logits(model, images)
    before = worth(model, images, expected)
    run(context_of(model, images), EqualizeOptions(only_outliers=True))
    assert made_factors(model) == ["norm.factors"] and model.norm.factors.weight[3] > 2
    assert torch.allclose(logits(model, images), expected, atol=1e-3)
    assert worth(model, images, expected) > before + 0.5


@pytest.mark.parametrize("keys", [{"PATCH_NORM": False}, {"APE": True}])
def test_a_stream_begins_with_whatever_the_config_has(keys, tiny_model, images, use_policy):
    model = use_policy(tiny_model("swinv2", **SHALLOW, **keys), "qdq")
    expected = logits(model, images)
    for stage, stream in enumerate(each for each in list_exchanges(model) if each.stream):
        rescale(model, stream, torch.rand(model.layers[stage].blocks[0].norm1.weight.shape) + 0.5)
        assert torch.allclose(logits(model, images), expected, atol=1e-4)
    assert stage == 1


def test_without_outliers_nothing_changes(shallow, images, use_policy):
    model = use_policy(shallow("swinv2"), "ft-mode1")
    calibrate(model, images.split(8))
    before = copy.deepcopy(model.state_dict())
    assert run(context_of(model, images), EqualizeOptions(only_outliers=True)) == "no unit gains"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("pictures", [torch.zeros(3, 3, 32, 32), torch.ones(1, 3, 32, 32)])
def test_constant_pictures_and_one_picture_do_no_harm(pictures, shallow, use_policy):
    model = use_policy(shallow("swin"), "ft-mode1")
    expected = logits(model, pictures)
    calibrate(model, [pictures])
    run(context_of(model, pictures), EqualizeOptions())
    assert torch.allclose(logits(model, pictures), expected, atol=1e-3)


class Branches(nn.Module):
    """Two branches from the pictures to the head: there is one unit. Channel 0 of the first one is large."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in range(2))
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            self.a[0].weight[0] *= 64
            self.a[2].weight[:, 0] /= 64

    def forward(self, x):
        return self.head((self.a(x) + self.b(x)).mean((2, 3)))


@pytest.mark.parametrize("order, gains", [([0, 4, 1, 5, 2, 6, 3, 7], True), ([0, 1, 2, 3, 4, 5, 6, 7], False)])
def test_factors_that_harm_other_pictures_are_not_taken(order, gains):
    """Channels 1 to 4 read red, which the last four pictures hardly have: their own factors would clip the first."""
    torch.manual_seed(0)
    module, pictures = Branches(), torch.randn(8, 3, 12, 12)
    with torch.no_grad():
        module.a[0].weight[1:5, 1:] = 0
        module.a[0].bias[1:5] = 0
        module.a[0].weight[0] /= 4
        module.a[2].weight[:, 0] *= 4
    pictures[4:, 0] *= 1e-4
    model = sq.calibrate(sq.wrap(module, 12), [pictures[order]], "qdq")
    (equalized,) = (one for one in model.card.calibration["passes"] if one["name"] == "equalize")
    assert (equalized["note"] != "no unit gains") is gains
