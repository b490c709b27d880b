"""Calibration on tiny models: results do not depend on batches, and errors are named."""

import pytest
import torch
from nightly import share
from torch import nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.models import build_model
from swin_quant.quant.calibration import (
    VALUES_PER_PICTURE,
    Method,
    calibrate,
    check_weights,
    observe,
    observing,
    set_ranges,
)
from swin_quant.quant.fake_quant import UNUSED_AMAX
from swin_quant.quant.policy import dequantize, quantize
from swin_quant.quant.quantizer import Role, State, named_nodes
from swin_quant.quant.watch import watching
from tests.helpers.settings import change

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])
METHODS = ("max", "percentile", "mse", "entropy")

SMALL = {"DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
# Windows of 49 tokens and few channels: sizes that no vector register or cache block divides.
ODD = {"WINDOW_SIZE": 7, "EMBED_DIM": 24, "DEPTHS": [2, 1], "NUM_HEADS": [2, 4]}
PATCHES = {"patch 2": {"IMG_SIZE": 28, "PATCH_SIZE": 2}, "patch 4": {"IMG_SIZE": 56, "PATCH_SIZE": 4}}


def ranges(model):
    return {name: node.amax.item() for name, node in named_nodes(model).items()}


def observed_tensors(model, images):
    """Every node's input, by hooks on the float model; independent of observers."""
    seen, nodes = {}, named_nodes(model)
    for node in nodes.values():
        node.state = State.CALIBRATE  # an enabled node shows the product before the bias
    with torch.no_grad(), watching(nodes, lambda name, node, inputs, y: seen.update({name: inputs[0].clone()})):
        model(images)
    dequantize(model)
    return seen


@pytest.mark.parametrize("kind", share(["swinv2", "swin"], 2))
@pytest.mark.parametrize("patch", PATCHES)
def test_batch_1_and_batch_32_count_the_same(kind, patch, tiny_model):
    """To the bit: a picture's numbers must not depend on the pictures around it."""
    model = tiny_model(kind, **(ODD | PATCHES[patch]))
    images = torch.randn(32, 3, model.geometry.image_size, model.geometry.image_size)
    one, five, whole = (observe(model, images.split(batch)) for batch in (1, 5, 32))
    for other in (one, five):
        assert other.pictures == whole.pictures == 32
        assert other.largest == whole.largest and other.ends == whole.ends
        for name, statistics in whole.statistics.items():
            pairs = zip((statistics, *statistics.sides), (found := other.statistics[name], *found.sides), strict=True)
            assert all(x.width == y.width and x.counts.tolist() == y.counts.tolist() for x, y in pairs), name


@KINDS
def test_exact_mode_counts_every_value_and_the_maximum_is_that_of_all_in_any_mode(kind, tiny_model):
    model = tiny_model(kind, IMG_SIZE=64, WINDOW_SIZE=8)
    images = torch.randn(2, 3, 64, 64)
    seen = observed_tensors(model, images)
    assert max(x[: len(x) // 2].numel() for x in seen.values()) > VALUES_PER_PICTURE
    exact, subset, largest = (observe(model, [images], how) for how in (Method(exact=True), Method(), Method("max")))
    assert exact.largest == subset.largest == largest.largest == {n: seen[n].abs().max().item() for n in exact.largest}
    for name, statistics in exact.statistics.items():
        assert statistics.counts.sum() == seen[name].numel()
        assert subset.statistics[name].counts.sum() <= 2 * VALUES_PER_PICTURE
        counts = torch.histc(seen[name].abs().double(), bins=4096, min=0, max=4096 * statistics.width)
        assert statistics.counts.tolist() == counts.long().tolist(), name


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_methods_differ_weights_take_their_maximum_and_no_range_is_above_max(kind, tiny_model):
    model = tiny_model(kind, **SMALL)
    calibration = observe(model, [torch.randn(4, 3, 32, 32)])
    found = {}
    for method in METHODS:
        set_ranges(model, calibration, Method(method, percentile=50.0))
        found[method] = ranges(model)
        for name, node in named_nodes(model).items():
            assert node.amax.shape == () and node.amax.dtype == torch.float32 and 0 < node.amax <= found["max"][name]
            if node.role is Role.GEMM_WEIGHT:
                assert node.amax == model.get_submodule(name.rpartition(".")[0]).weight.abs().max()
    activations = [name for name in found["max"] if not name.endswith("_weight_quantizer")]
    for method in ("percentile", "mse", "entropy"):
        assert sum(found[method][name] < found["max"][name] for name in activations) > len(activations) / 2


def test_bits_of_a_node_decide_its_mse_range(tiny_model):
    model = tiny_model("swin", **SMALL)
    calibration = observe(model, [torch.randn(4, 3, 32, 32)])
    set_ranges(model, calibration, Method("mse"))
    wide = ranges(model)
    for node in named_nodes(model).values():
        change(node, bits=4)
    set_ranges(model, calibration, Method("mse"))
    name = "layers.0.blocks.0.attn.qkv._input_quantizer"
    assert ranges(model)[name] < 0.9 * wide[name]


@KINDS
def test_ranges_are_those_of_the_float_model_even_if_it_was_quantizing(kind, tiny_model, use_policy):
    model = tiny_model(kind)
    images = torch.randn(4, 3, 32, 32)
    calibrate(model, [images])
    first = ranges(model)
    use_policy(model, "ft-mode1")
    for node in named_nodes(model).values():
        change(node, bits=2)
    quantize(model)
    for node in named_nodes(model).values():
        change(node, bits=8)
    calibrate(model, [images])
    assert ranges(model) == first


def assert_calibration_left_no_trace(model):
    for node in named_nodes(model).values():
        assert node.state is State.OFF and node.observer is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def broken_loader(images):
    yield images
    raise OSError("the disk is gone")


@pytest.mark.parametrize("training", [True, False])
def test_states_and_mode_are_restored_after_any_failure(training, tiny_model):
    model = tiny_model().train(training)
    images = torch.randn(2, 3, 32, 32)
    with pytest.raises(OSError, match="the disk is gone"):
        observe(model, broken_loader(images))
    assert_calibration_left_no_trace(model)
    model.patch_embed.proj.weight.data *= 1e38
    model.patch_embed.norm.weight.data *= 3e38
    with pytest.raises(SwinQuantError):
        observe(model, [images])
    assert_calibration_left_no_trace(model)
    assert model.training == training and all(node.amax is None for node in named_nodes(model).values())


@pytest.mark.parametrize("batches", [[], [torch.empty(0, 3, 32, 32)]], ids=["no batch", "empty batch"])
def test_no_picture_is_an_error(batches, tiny_model):
    model = tiny_model()
    with pytest.raises(SwinQuantError, match="no picture"):
        calibrate(model, batches)
    assert all(node.amax is None for node in named_nodes(model).values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["patch_embed.proj.bias", "layers.1.blocks.0.mlp.fc2.weight", "head.weight"])
def test_a_weight_that_is_not_finite_is_named(name, value, tiny_model):
    model = tiny_model()
    check_weights(model)
    model.get_parameter(name).data.view(-1)[-1] = value
    with pytest.raises(SwinQuantError, match=rf"weight {name} holds"):
        observe(model, [torch.randn(1, 3, 32, 32)])


def test_complex_weights_are_looked_at():
    module = nn.Module()
    module.spectrum = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    check_weights(module)
    module.spectrum.data[1] = complex(0, float("nan"))
    with pytest.raises(SwinQuantError, match="weight spectrum holds NaN"):
        check_weights(module)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pictures_that_are_not_finite_are_to_blame(value, tiny_model):
    images = torch.randn(2, 3, 32, 32)
    images[1, 0, 5, 5] = value
    with pytest.raises(SwinQuantError, match="the input pictures"):
        observe(tiny_model(), [images])


def first_overflow(model, images):
    """The first module to finish with a result that is not finite."""
    finished, modules = [], dict(model.named_modules())
    del modules[""]
    with torch.no_grad(), watching(modules, lambda name, module, inputs, y: finished.append((name, y))):
        model(images)
    return next(name for name, output in finished if not output.isfinite().all())


# Parameters to scale, and the place of the first overflow: single products, which no order of summation keeps finite.
OVERFLOWS = {
    "layers.0.blocks.1.mlp.fc2": {"layers.0.blocks.1.mlp.fc1.weight": 1e20, "layers.0.blocks.1.mlp.fc2.weight": 1e20},
    "layers.0.downsample.norm": {"layers.0.downsample.norm.weight": 3e38},
    "head": {"norm.weight": 1e3, "head.weight": 3e38},
}


@KINDS
@pytest.mark.parametrize("expected", OVERFLOWS)
def test_an_overflow_names_the_first_module(kind, expected, tiny_model):
    scales = OVERFLOWS[expected]
    model = tiny_model(kind)
    for name, scale in scales.items():
        parameter = model.get_parameter(name).data
        parameter.copy_(parameter.sign() * (parameter.abs() * scale).clamp(max=3e38))
    images = torch.randn(2, 3, 32, 32)
    name = first_overflow(model, images)
    assert name.startswith(expected)
    with pytest.raises(SwinQuantError) as caught:
        calibrate(model, [images])
    message = str(caught.value)
    assert f"module {name} is the first" in message and "\n" not in message
    assert_calibration_left_no_trace(model)


def test_an_overflow_inside_attention_names_its_node(tiny_model):
    model = tiny_model()
    model.layers[0].blocks[1].attn.qkv.weight.data *= 1e25
    with pytest.raises(
        SwinQuantError, match=r"module layers\.0\.blocks\.1\.attn\.softmax_input_quantizer is the first"
    ):
        calibrate(model, [torch.randn(2, 3, 32, 32)])


def test_dead_nodes_are_listed_and_get_a_positive_range(tiny_config):
    """A new V2 adds nothing in its branches: exactly their operands are zero."""
    model = build_model(tiny_config("swinv2", **SMALL))
    images = torch.randn(2, 3, 32, 32)
    zero = {name for name, x in observed_tensors(model, images).items() if not x.any()}
    assert zero == {name for name in named_nodes(model) if "local_input" in name}
    for method in METHODS:
        calibration = calibrate(model, [images], Method(method))
        assert set(calibration.dead) == zero and len(calibration.dead) == len(zero)
        for name, amax in ranges(model).items():
            assert (amax == UNUSED_AMAX == 1.0) if name in zero else amax > 0


def test_values_beyond_float16_are_reported(tiny_model):
    model = tiny_model()
    model.layers[0].blocks[0].mlp.fc1.weight.data *= 1e6
    model.layers[0].blocks[0].mlp.fc2.weight.data *= 1e-6
    beyond = calibrate(model, [torch.randn(2, 3, 32, 32)]).beyond_half
    fc1, fc2 = "layers.0.blocks.0.mlp.fc1._aftergemm_quantizer", "layers.0.blocks.0.mlp.fc2._input_quantizer"
    assert set(beyond) == {fc1, fc2}


def test_without_a_method_each_node_has_that_of_its_bits(tiny_model):
    model = tiny_model("swin", **SMALL)
    calibration = observe(model, [torch.randn(2, 3, 32, 32)])
    nodes = {name: node for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    for number, node in enumerate(nodes.values()):
        change(node, bits=8 if number % 2 else 4)
    found = {}
    for method in (None, "percentile", "mse"):
        set_ranges(model, calibration, Method(method))
        found[method] = ranges(model)
    assert all(found[None][name] == found["percentile" if node.setting.bits == 8 else "mse"][name]
               for name, node in nodes.items())  # fmt: skip
    assert found["percentile"] != found[None] != found["mse"]


@pytest.mark.parametrize("together", [True, False], ids=["in batches", "one by one"])
def test_the_float_models_logits_of_each_batch_are_given(tiny_model, monkeypatch, together):
    model = tiny_model()
    images = torch.randn(5, 3, 32, 32)
    monkeypatch.setattr("swin_quant.quant.calibration.torch.equal", lambda *_: together)
    with observing(model, Method("max")) as observation:
        found = [observation.show(batch) for batch in (images[:3], images[:0], images[3:])]
    with torch.inference_mode():
        assert [len(logits) for logits in found] == [3, 0, 2]
        torch.testing.assert_close(torch.cat(found), model(images), rtol=1e-4, atol=1e-5)


def test_a_search_without_histograms_is_refused(tiny_model):
    model = tiny_model()
    seen = observe(model, [torch.randn(1, 3, 32, 32)], Method("max"))
    with pytest.raises(UsageError, match="needs histograms"):
        set_ranges(model, seen, Method("mse"))
