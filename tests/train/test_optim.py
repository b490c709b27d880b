import math

import pytest
import torch
import torch.nn.functional as F

from swin_quant.models.layers import DropPath
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.train.amax import RangeKeeper
from swin_quant.train.optim import freeze_stages, layers_to_head, make_optimizer, make_schedule
from swin_quant.train.recipe import Optimizer, Ranges, Schedule


def grouped(model, *recipe):
    """(name, parameter, its group) of every parameter that an optimizer trains."""
    groups = {id(one): group for group in make_optimizer(model, *recipe, 1).param_groups for one in group["params"]}
    return [(name, one, groups[id(one)]) for name, one in model.named_parameters()]


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_weight_decay_is_for_matrices_alone(tiny_model, kind):
    decayed = {name for name, _, group in grouped(tiny_model(kind, APE=True), Optimizer()) if group["weight_decay"]}
    matrices = ("blocks.0.attn.qkv", "downsample.reduction")
    assert {"patch_embed.proj.weight", "head.weight", *(f"layers.0.{name}.weight" for name in matrices)} <= decayed
    kept = ("bias", "norm", "relative_position", "cpb_mlp", "logit_scale", "absolute_pos_embed")
    assert not [name for name in decayed if any(part in name for part in kept)]


def test_layer_decay_counts_blocks_from_the_head(tiny_model):
    model = tiny_model(DEPTHS=[2, 1], NUM_HEADS=[1, 2])
    expected = {
        **{"head.weight": 0, "norm.bias": 0, "layers.1.blocks.0.mlp.fc1.weight": 1},
        **{"layers.0.downsample.norm.weight": 2, "layers.0.blocks.1.norm1.weight": 2},
        **{"layers.0.blocks.0.norm1.weight": 3, "patch_embed.proj.weight": 4},
    }
    assert {name: layers_to_head(model)[name] for name in expected} == expected
    rates = {name: group["lr"] for name, _, group in grouped(model, Optimizer(lr=1.0, layer_decay=0.5))}
    assert {name: rates[name] for name in expected} == {name: 0.5**distance for name, distance in expected.items()}


def test_ranges_have_an_lr_relative_to_their_size(tiny_model):
    model = tiny_model()
    nodes = list(named_nodes(model).values())[:3]
    for node, amax in zip(nodes, (0.1, 1.0, 30.0), strict=True):
        node.amax = amax
        node.learn_range()
    ranges = [(one, group) for _, one, group in grouped(model, Optimizer(amax_lr=0.01)) if group["role"] == "amax"]
    assert len(ranges) == 3 and not any(group["weight_decay"] for _, group in ranges)
    assert all(0.01 / 1.5 < group["lr"] / amax.item() < 0.01 * 1.5 for amax, group in ranges)


def test_the_lr_grows_with_the_batch_only_where_the_recipe_says_for_which_batch_it_is(tiny_model):
    model = tiny_model()
    assert make_optimizer(model, Optimizer(lr=1e-3), 64).param_groups[0]["lr"] == 1e-3
    assert make_optimizer(model, Optimizer(lr=1e-3, lr_batch=512), 64).param_groups[0]["lr"] == pytest.approx(1.25e-4)
    assert isinstance(make_optimizer(model, Optimizer(name="sgd"), 1), torch.optim.SGD)


def test_cosine_with_warm_up_step_by_step():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 0.4)
    schedule, found = make_schedule(optimizer, Schedule(warmup_epochs=2, warmup_from=0.1, end=0.05), 10, 5), []
    for _ in range(50):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    warm = [0.4 * (0.1 + 0.9 * (step + 1) / 10) for step in range(10)]
    cosine = [0.4 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / 40)) / 2) for step in range(40)]
    assert found == pytest.approx(warm + cosine)


def test_frozen_stages_keep_weights_and_ranges_to_the_bit(tiny_model):
    model, images = tiny_model("swin", DROP_PATH_RATE=0.2), torch.randn(4, 3, 32, 32)
    calibrate(model, [images], Method("max"))
    apply_policy(model, load_policy("qdq"))
    frozen = freeze_stages(model, 1)
    quantize(model)
    keeper = RangeKeeper(model, Ranges(mode="learned"), 1, lambda: [images], frozen)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = make_optimizer(model, Optimizer(lr=0.1), 4, fused=False)
    model.train()
    F.cross_entropy(model(images), torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()
    keeper.after_step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert not any(key.startswith(("patch_embed", "layers.0")) for key in moved)
    assert "head.weight" in moved and "layers.1.blocks.0.mlp.fc1.weight" in moved
    assert "layers.1.blocks.0.mlp.fc1._input_quantizer._amax" in moved
    assert all(m.rate == 0 for name, m in model.named_modules() if isinstance(m, DropPath) and "layers.0" in name)
