"""Distillation: its gain on other pictures, its traces."""

from functools import partial

import pytest
import torch
from nightly import share
from pass_contexts import same, sqnr

from swin_quant.quant.passes import distill
from swin_quant.quant.passes.distill import DistillOptions, run
from swin_quant.quant.policy import dequantize, enabled_nodes, quantize
from swin_quant.quant.quantizer import State, named_nodes

SHORT = DistillOptions(iterations=4, batch=4)


@pytest.fixture
def make_context(make_context):
    return partial(make_context, pictures=24)


@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
def test_logits_of_other_pictures_come_nearer_to_float(kind, make_context, images):
    context = make_context(kind)
    before = sqnr(context, images[24:])
    note = run(context, DistillOptions(iterations=15, batch=8, weight_rate=1e-3))
    assert sqnr(context, images[24:]) > before + 0.5, note
    assert note.startswith("error of logits ") and "dB lower on pictures held out" in note


def test_the_divergence_of_class_probabilities_decreases(make_context, images):
    def divergence(context):
        with torch.inference_mode():
            wanted = context.original(images[24:]).double().softmax(1)
            quantize(context.model)
            found = context.model(images[24:]).double().softmax(1)
            dequantize(context.model)
        return (wanted * (wanted / found).log()).sum(1).mean()

    context = make_context()
    before = divergence(context)
    note = run(context, DistillOptions(iterations=6, batch=8, weight_rate=3e-3, range_rate=1e-2, classes=1.0))
    assert divergence(context) < before and note.startswith("divergence of classes ")


@pytest.mark.parametrize("kind", ["embedding", "features"])
def test_a_network_without_classes_learns_by_what_it_gives(kind, make_context):
    """Maps have no softmax: `best`'s loss of classes below 8 bits would let their size drift."""
    states = []
    for classes in (0.0, 1.0):
        context = make_context(OUTPUT_KIND=kind)
        assert "classes" not in run(context, DistillOptions(iterations=2, batch=8, classes=classes))
        states.append(context.model.state_dict())
    assert same(*states)


def test_it_is_judged_on_pictures_that_no_pass_has_seen_as_they_are(make_context, monkeypatch):
    judged, cost = [], distill._cost
    monkeypatch.setattr(distill, "_cost", lambda context, images: judged.append(images) or cost(context, images))
    context = make_context()
    run(context, DistillOptions(iterations=1, batch=4))
    given = torch.cat(list(context.images))
    assert len(judged) == 2 and torch.equal(*judged) and len(judged[0]) == 6
    assert not any(torch.equal(one, other) for one in judged[0] for other in given)


@pytest.mark.parametrize("policy", ["ft-mode1", "cpu"])
def test_nodes_are_off_and_ranges_keep_their_kind(policy, make_context):
    context = make_context(policy=policy, bits=8)
    zero_points = {name: node.grid for name, node in enabled_nodes(context.model).items()}
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    distill._learn(context, torch.cat(list(context.images)), torch.ones(3), SHORT)
    assert not same(context.model.state_dict(), before)
    for name, node in named_nodes(context.model).items():
        assert node.state is State.OFF and not isinstance(node.amax, torch.nn.Parameter)
        assert not node.setting.enabled or node.grid == zero_points[name]


def test_without_a_finite_gain_nothing_changes(make_context, monkeypatch):
    for options, message in (
        (DistillOptions(iterations=2, batch=8, weight_rate=9.0), "no gain"),
        (SHORT, "not finite"),
    ):
        if options is SHORT:
            monkeypatch.setattr(distill, "varied", lambda x, _: x * float("nan" if len(x) == SHORT.batch else 1))
        context = make_context()
        before = {name: value.clone() for name, value in context.model.state_dict().items()}
        assert message in run(context, options)
        assert same(context.model.state_dict(), before)
        assert all(node.state is State.OFF for node in named_nodes(context.model).values())
