"""Every rewrite computes what was trained, in torch and in ONNX Runtime, with fewer operators."""

import pytest
import torch
from nightly import share

from swin_quant.backends.onnx.network import network
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.backends.onnx.swin import REWRITES
from swin_quant.quant.policy import enabled_nodes
from tests.helpers.settings import change

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])
STEPS = [frozenset(list(REWRITES)[:n]) for n in range(len(REWRITES) + 1)]


@KINDS
@pytest.mark.parametrize("policy", ["qdq", pytest.param("ft-mode1", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("rewrites", STEPS, ids=lambda names: "+".join(sorted(names)))
def test_torch_computes_the_same(kind, policy, rewrites, calibrated, images, assert_quantized_alike):
    model, _ = calibrated(kind, policy)
    with torch.no_grad():
        assert_quantized_alike(network(model, OnnxOptions(rewrites=rewrites), None)(images).numpy(), kind, policy)
        for node in enabled_nodes(model).values():
            change(node, enabled=False)
        floats = network(model, OnnxOptions(rewrites=rewrites), None)(images)
        torch.testing.assert_close(floats, model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "rewrites", share([(STEPS[-1],), (STEPS[0],)], 2), ids=["all", "none"]
)  # torch computes each step
def test_onnx_runtime_computes_the_same(rewrites, exported, run, images, assert_quantized_alike):
    assert_quantized_alike(run(exported("swin", rewrites=rewrites).file, images)["logits"], "swin")


def test_the_scale_leaves_no_trace_and_rounds_no_weight_anew(calibrated):
    """Levels stay; the scales of the columns of q and of its node are multiplied."""
    model, _ = calibrated("swin")
    plain = network(model, OnnxOptions(rewrites=frozenset({"fusible-attention"})), None)
    folded = network(model, OnnxOptions(rewrites=frozenset({"fusible-attention", "scale-in-weights"})), None)
    name, channels = "layers.0.blocks.1.attn", model.geometry.embed_dim
    trained, attn = model.get_submodule(name), folded.get_submodule(name)
    before, after = (net.get_submodule(f"{name}.qkv._weight_quantizer") for net in (plain, folded))
    assert torch.equal(before.values, after.values) and attn.scale is None
    factors = (after.scale / before.scale).view(3, channels)
    torch.testing.assert_close(factors, torch.tensor([trained.scale, 1.0, 1.0])[:, None].expand(3, channels))
    amax = trained.matmul_q_input_quantizer.amax
    torch.testing.assert_close(attn.matmul_q_input_quantizer.scale, amax * trained.scale / 127)


def test_a_shared_range_of_qkv_keeps_the_scale_outside_the_weights(graph, count):
    """The int8 product of q, k and v has one range, so that q alone cannot be scaled in it. It is scaled after the
    pair."""
    modes = count(graph("swin", "ft-mode1"))
    gelus = 2 * modes["Erf"]  # each multiplies twice
    assert modes["Mul"] - gelus == 3 and count(graph("swin"))["Mul"] == gelus


@pytest.mark.nightly
@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_onnx_runtime_transposes_keys_inside_their_product(kind, exported, count, optimized):
    """Without fused attention, windows are a dimension of their own in the graph that ONNX Runtime makes and runs."""
    portable, own = (
        count(optimized(exported(kind, "cpu", target=target).file))["Transpose"]
        for target in ("portable", "onnxruntime")
    )
    assert own == 1 + 3 * 2 < portable  # patches; in a block, q, k and v together, and the result
