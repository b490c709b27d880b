"""A node's cost equals that of switching only it on, or only it off, and comparing logits."""

import numpy as np
import pytest
import torch
from nightly import share

from swin_quant.base.errors import SwinQuantError
from swin_quant.models.registry import list_blocks, list_stages
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.quant.quantizer import State, named_nodes
from swin_quant.quant.sensitivity import BLOCK, LAYER, NODE, ROLE, STAGE, layer_losses, sensitivity
from swin_quant.quant.watch import watching

SMALL = {"EMBED_DIM": 16, "DEPTHS": [1, 2], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}


@pytest.fixture(scope="module")
def subject(tiny_model):
    """subject(kind) -> a calibrated tiny model under ft-mode1 with 4 bits, and its batches, 9 pictures."""

    def make(kind):
        torch.manual_seed(0)
        model, images = tiny_model(kind, **SMALL), torch.randn(9, 3, 32, 32)
        policy = load_policy("ft-mode1").bits("role:activation", 4)
        apply_policy(model, policy)
        calibrate(model, [images])
        return model, policy, list(images.split(4))

    return make


@pytest.fixture(scope="module")
def measured(subject):
    """measured(kind) -> model, policy, batches, and their sensitivity."""
    known = {}

    def get(kind):
        if kind not in known:
            model, policy, batches = subject(kind)
            known[kind] = model, policy, batches, sensitivity(model, batches, list_blocks(model), list_stages(model))
        return known[kind]

    return get


def logits(model, batches):
    with torch.inference_mode():
        return torch.cat([model(images) for images in batches]).double().numpy()


def by_hand(found, expected):
    """SQNR, divergence, agreement, expected drop and its standard error from logits, in numpy."""
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (expected, found))
    sqnr = 10 * np.log10((expected**2).sum() / ((found - expected) ** 2).sum())
    agreeing, rows = found.argmax(1) == expected.argmax(1), range(len(p))
    drops = 100 * (p.max(1) - p[rows, found.argmax(1)])
    error = drops.std() / len(drops) ** 0.5
    return sqnr, (p * np.log(p / q)).sum(1).mean(), 100 * agreeing.mean(), drops.mean(), error


def values(loss):
    return loss.sqnr_db, loss.kl, loss.agreement, loss.drop, loss.drop_error


@pytest.mark.kernels
@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_alone_and_left_out_are_what_the_whole_model_gives(kind, measured):
    model, policy, batches, found = measured(kind)
    groups = {(group.kind, group.name): group for group in found.groups}
    fc2 = "layers.1.blocks.1.mlp.fc2._input_quantizer"
    chosen = [(NODE, fc2), (LAYER, "layers.1.blocks.0.attn"), (BLOCK, "layers.0.blocks.0"), (STAGE, "layers.0"),
              (NODE, "layers.0.downsample.reduction._input_quantizer"), (ROLE, "role:gemm_weight")]  # fmt: skip
    expected = logits(model, batches)  # nodes are off
    for key in chosen:
        group = groups[key]
        apply_policy(model, load_policy("float").on(*group.nodes).bits("role:activation", 4))
        quantize(model)
        assert values(group.alone) == pytest.approx(by_hand(logits(model, batches), expected), rel=1e-6)
        apply_policy(model, policy.off(*group.nodes))
        quantize(model)
        assert values(group.without) == pytest.approx(by_hand(logits(model, batches), expected), rel=1e-6)
    apply_policy(model, policy)
    quantize(model)
    assert values(found.overall) == pytest.approx(by_hand(logits(model, batches), expected), rel=1e-6)
    apply_policy(model, policy)


def test_every_node_is_measured_and_the_model_left_as_it_was(measured):
    model, policy, batches, found = measured("swin")
    apply_policy(model, policy)
    assert [group.name for group in found.groups if group.kind == NODE] == list(enabled_nodes(model))
    assert found.pictures == 9 and list(found.profile) == list(list_blocks(model))
    assert all(node.state is State.OFF for node in named_nodes(model).values())
    assert {group.kind for group in found.groups} == {NODE, LAYER, BLOCK, STAGE, ROLE}
    assert found.forwards < 0.9 * (2 + 2 * len(found.groups)), "blocks before a group's first node replay their outputs"


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_the_profile_is_the_error_of_each_block(kind, measured):
    model, policy, batches, found = measured(kind)
    seen = {name: [] for name in list_blocks(model)}
    apply_policy(model, policy)
    with watching(list_blocks(model), lambda name, block, inputs, y: seen[name].append(y)):
        logits(model, batches)
        quantize(model)
        logits(model, batches)
    for name, outputs in seen.items():
        x, y = (torch.cat(each).double().numpy() for each in (outputs[: len(batches)], outputs[len(batches) :]))
        assert found.profile[name] == pytest.approx(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()))
    apply_policy(model, policy)


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_the_losses_of_layers_are_those_of_sensitivity(kind, measured):
    model, policy, batches, found = measured(kind)
    apply_policy(model, policy)
    images = torch.cat(batches)
    alone = {group.name: group.alone for group in sensitivity(model, [images], {}).groups if group.kind == LAYER}
    apply_policy(model, policy)
    assert layer_losses(model, images, list_blocks(model)) == alone


def test_no_pictures_or_no_enabled_nodes_are_an_error(subject):
    model, policy, batches = subject("swin")
    with pytest.raises(SwinQuantError, match="no picture"):
        sensitivity(model, [], list_blocks(model))
    apply_policy(model, load_policy("float"))
    with pytest.raises(SwinQuantError, match="no node is on"):
        sensitivity(model, batches, list_blocks(model))
