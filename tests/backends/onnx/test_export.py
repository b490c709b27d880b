"""The exported file: what it computes, what it holds, and exports that are refused."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from nightly import share

from swin_quant.backends.onnx import export as exporting
from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import compute_data_sha256
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.models.captured import captured
from swin_quant.quant.fake_quant import fake_quant as simulate
from swin_quant.quant.policy import Rule, enabled_nodes, load_policy, quantize
from swin_quant.quant.quantizer import Role

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])


@pytest.mark.kernels
@KINDS
def test_every_level_of_every_node_is_fake_quant_s(kind, exported, calibrated, run, images, assert_quantized_alike):
    """Two checks, since sums of two libraries differ in last bits, and a tie that rounds differently changes later
    nodes.

    1. All of a node's levels are those that fake-quant makes of the node's input in the file. 2. Sorted, since windows
    reorder tokens, they are those of the model in torch, apart from at most 2 % of a node's values that differ by one
    level (0, 0.1 and 0.8 % on three kinds of CPU).
    """
    model, _ = calibrated(kind)
    levels = {}

    def keep(node, _, output):
        levels[node.name] = (output / (node.amax / 127)).round().flatten().sort().values.numpy()

    quantize(model)
    for node in enabled_nodes(model).values():
        node.register_forward_hook(keep)
    with torch.no_grad():
        model(images)
    proto = onnx.load(exported(kind).file)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    quantizers = {node.name: node for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    shown = {name for node in quantizers.values() for name in (node.input[0], node.output[0])} - {"images"}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(shown))
    results = run(proto, images)
    assert_quantized_alike(results["logits"], kind)
    for name, node in enabled_nodes(model).items():
        if node.role is Role.GEMM_WEIGHT:
            continue
        quantizer = quantizers[f"{name}.QuantizeLinear"]
        found = results[quantizer.output[0]].astype(np.float32)
        positions = results[quantizer.input[0]] / tensors[quantizer.input[1]]
        assert np.array_equal(found, positions.round().clip(-128, 127)), name
        steps = np.abs(np.sort(found.flatten()) - levels[name])
        assert steps.max() <= 1 and steps.mean() <= 0.02, name


@pytest.mark.parametrize(("opset", "kind"), share([(18, "swinv2"), (17, "swin"), (17, "swinv2"), (19, "swin")], 4))
def test_older_opsets_compute_the_same(kind, opset, exported, run, assert_quantized_alike, images):
    file = exported(kind, opset=opset).file
    model = onnx.load(file)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert model.ir_version == {17: 8, 18: 8, 19: 9}[opset]  # https://onnx.ai/onnx/repo-docs/Versioning.html
    onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True, data_prop=True)
    assert_quantized_alike(run(file, images)["logits"], kind)


@pytest.mark.kernels
@KINDS
def test_float_is_the_float_model_for_any_batch(kind, exported, run, fake_quant):
    artifact = exported(kind, precision="float")
    assert artifact.file.name == f"{kind}_tiny_fp32.onnx" and artifact.record["precision"] == "float32"
    for batch in (1, 5):
        images = torch.randn(batch, 3, 32, 32)
        np.testing.assert_allclose(run(artifact.file, images)["logits"], fake_quant(kind, images)[1], atol=1e-5)


@KINDS
def test_every_active_node_is_one_pair_under_its_name(kind, graph, calibrated):
    graph, (model, _) = graph(kind), calibrated(kind)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = {node.name.removesuffix(".QuantizeLinear"): node for node in graph.node if node.op_type == "QuantizeLinear"}
    nodes = enabled_nodes(model)
    assert set(pairs) == {name for name, node in nodes.items() if node.role is not Role.GEMM_WEIGHT}
    readers = {node.input[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    for name, quantized in pairs.items():
        back = readers[quantized.output[0]]
        assert [node.input[0] for node in graph.node].count(quantized.output[0]) == 1
        assert back.name == f"{name}.DequantizeLinear" and list(back.input[1:]) == list(quantized.input[1:])
        zero = tensors[quantized.input[2]]
        assert zero.dtype == np.int8 and not zero.any()
        if "matmul_q" not in name:  # q includes attention's scale
            assert tensors[f"{name}.scale"] == pytest.approx(nodes[name].amax.item() / 127, rel=1e-6)


FEWER_BITS = ["cpu, weights of 4 bits", "cpu, weights of 7 bits"]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("swin", "qdq"), ("swinv2", "ft-mode1"), *share([("swin", policy) for policy in FEWER_BITS], 2)],
)
def test_weights_are_stored_as_the_levels_of_fake_quant(kind, policy, graph, calibrated):
    """In int8, also where they have fewer bits."""
    graph, (model, _) = graph(kind, policy), calibrated(kind, policy)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    used = {node.name: node for node in graph.node if node.op_type == "DequantizeLinear"}
    for name, node in enabled_nodes(model).items():
        if node.role is Role.GEMM_WEIGHT:
            weight, top = model.get_submodule(name.rpartition(".")[0]).weight.detach(), 2 ** (node.setting.bits - 1) - 1
            amax = node.range_for(weight)
            levels = simulate(weight, amax, -top - 1, top) / (amax / top)
            stored = tensors[f"{name}.values"]
            assert stored.dtype == np.int8 and np.array_equal(stored.T, levels.round().numpy()), name
            axis = {attribute.name: attribute.i for attribute in used[f"{name}.DequantizeLinear"].attribute}
            assert len(tensors[f"{name}.scale"].shape) == 0 or axis == {"axis": 1}


@pytest.mark.kernels
def test_narrow_weights_keep_to_127(calibrated, tmp_path):
    model, card = calibrated("swin")
    rules = [{"enable": ["role:gemm_weight"], "narrow_range": True, "bits": 8}]
    card = replace(card, policy={"name": "narrow", "description": "", "rules": rules})
    for node in enabled_nodes(model).values():
        if node.role is Role.GEMM_WEIGHT:
            node.amax = node.amax / 4  # most weights saturate
    graph = onnx.load(export(model, card, tmp_path).file).graph
    values = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("_weight_quantizer.values")]
    assert min(v.min() for v in values if v.dtype == np.int8) == -127


@pytest.mark.kernels
def test_metadata_and_card(calibrated, tmp_path):
    model, card = calibrated("swin")
    labels = tuple(f"digit {i}" for i in range(10))
    artifact = export(model, card, tmp_path, OnnxOptions(labels=labels))
    again = open_artifact(artifact.file)
    assert again.record["backend"] == "onnx" and again.record["precision"] == "int8" and again.record["others"] == []
    assert again.record["options"]["opset"] == 17 and "window-order" in again.record["options"]["rewrites"]
    found = {entry.key: entry.value for entry in onnx.load(artifact.file).metadata_props}
    assert json.loads(found["swin_quant.preprocess"]) == json.loads(json.dumps(card.preprocess))
    assert json.loads(found["swin_quant.labels"]) == list(labels)
    assert json.loads(found["swin_quant.policy"]) == json.loads(json.dumps(card.policy))
    later = {"schema", "artifact", "results", "verification", "versions", "created"}
    kept = {key: value for key, value in without_paths(again.card).items() if key not in later}
    assert found["swin_quant.run_card_sha256"] == compute_data_sha256(kept)


def test_weights_beyond_the_limit_go_into_a_second_file(
    calibrated, run, images, assert_quantized_alike, tmp_path, monkeypatch
):
    monkeypatch.setattr(exporting, "ONE_FILE_LIMIT", 10_000)
    model, card = calibrated("swin")
    artifact = export(model, card, tmp_path)
    assert [other["file"] for other in artifact.record["others"]] == ["swin_tiny_int8.onnx.data"]
    assert artifact.file.stat().st_size < 200_000
    open_artifact(artifact.file)
    assert_quantized_alike(run(artifact.file, images)["logits"], "swin")


@pytest.mark.kernels
def test_a_float_file_says_nothing_of_compiled_branches(caplog, tmp_path):
    """Its branches could never be compiled: it is what the int8 file is compared with."""
    net = import_timm().create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10).eval()
    network = captured(net, (3, 32, 32), 10, what="micro")
    caplog.set_level("INFO", "swin_quant")
    made = export(network, RunCard("micro", {}, {}), tmp_path, OnnxOptions(target="openvino", precision="float"))
    assert not {"compiled", "left_plain"} & made.record["options"].keys() and "compiled" not in caplog.text


def test_absolute_positions_follow_their_tokens(calibrated, run, images, tmp_path):
    model, card = calibrated("swin", APE=True)
    artifact = export(model, card, tmp_path, OnnxOptions(precision="float"))
    with torch.no_grad():
        np.testing.assert_allclose(run(artifact.file, images)["logits"], model(images), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opset": 16}, "opset 16: must be 17 to 20"),
        ({"opset": 21}, "opset 21: must be 17 to 20"),
        ({"precision": "int4"}, "no precision 'int4'"),
        ({"target": "tflite"}, "no target 'tflite'"),
        ({"float_type": "bfloat16"}, "no float type 'bfloat16'"),
        ({"target": "openvino", "float_type": "float16"}, "target openvino is for CPUs"),
        ({"float_type": "float16", "opset": 18}, "float16 scales of Q/DQ need 19"),
        ({"batch": 0}, "batch 0: must be a whole number from 1"),
        ({"int4_weights": True, "opset": 20}, "opset 20: int4_weights needs 21"),
        ({"int4_weights": True, "precision": "float"}, "not with precision float"),
        ({"int4_weights": True, "target": "tensorrt"}, "not with target tensorrt"),
        *(({"npu": True, **options}, "npu: the file takes one picture at a time, in float32")
          for options in ({"batch": 2}, {"float_type": "float16"})),
        ({"plugin": ("roll:my.Roll",)}, "must be OPERATOR=DOMAIN::NAME"),
        ({"plugin": ("gelu=my::Gelu",)}, "'gelu'; did you mean relu"),
        ({"plugin": ("roll=my::Op", "relu=my::Op")}, "roll is my::Op already"),
        ({"plugin": ("roll=my::A", "roll=my::B")}, "is named twice"),
        ({"plugin": ("roll=ai.onnx::Roll",)}, "the domain ai.onnx is not yours"),
        ({"plugin": ("roll=my::Roll",), "replace": ("roll",)}, "is replaced as well"),
        ({"replace": ("rol",)}, "'rol'; did you mean roll"),
        ({"replace": ("dft",)}, "'dft': there are pool1d"),
        ({"plugin": ("attention=my::A", "roll=my::R")}, "attention: its graph has no operators for replace or other"),
        ({"plugin": ("attention=my::A",), "float_type": "float16"}, "not in float16"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, says):
    with pytest.raises(UsageError, match=says):
        OnnxOptions(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rewrites": frozenset({"magic"})}, "no rewrite 'magic': there are fusible-attention, scale-in-weights"),
        ({"rewrites": frozenset({"window-order"})}, "window-order builds on fusible-attention"),
        ({"float_type": "float16", "rewrites": frozenset()}, "needs the rewrites fusible-attention and window-order"),
        ({"top_k": 0}, "must be a whole number from 1"),
        ({"top_k": 99999}, "99999: the model has"),
        ({"target": "tensorrt", "uint8_input": True}, "not with target tensorrt"),
        ({"target": "tensorrt", "softmax": True}, "not with target tensorrt"),
        ({"policy": "tensorrt-fp8", "target": "openvino"}, "no float8, and policy .* has it at layers.0.*_quantizer"),
        ({"policy": "tensorrt-fp8", "opset": 18}, "float8 of policy tensorrt-fp8 needs 19"),
        ({"policy": "zero points", "target": "tensorrt"}, r"tensorrt takes no zero points.*layers.0.blocks.0.*without"),
    ],
)  # fmt: skip
def test_exports_that_are_refused_before_a_file_is_written(calibrated, tmp_path, options, says):
    policy, options = options.get("policy", "qdq"), {key: value for key, value in options.items() if key != "policy"}
    with pytest.raises(UsageError, match=says) as caught:
        export(*calibrated("swin", policy), tmp_path, OnnxOptions(**options))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported(calibrated, tmp_path):
    model, card = calibrated("swin")
    node = model.layers[0].blocks[0].mlp.fc1._input_quantizer
    for amax, says in ((None, "have no range"), (0.0, "range \\(amax\\) of 0"), (float("nan"), "of 0, NaN")):
        node.amax = amax
        with pytest.raises(SwinQuantError, match=f"{says}.*layers.0.blocks.0.mlp.fc1._input_quantizer"):
            export(model, card, tmp_path)
    model, card = calibrated("swin")
    with pytest.raises(UsageError, match="3 labels for 10 classes"):
        export(model, card, tmp_path, OnnxOptions(labels=("a", "b", "c")))
    with pytest.raises(SwinQuantError, match="names no policy"):
        export(model, replace(card, policy=None), tmp_path)
    with pytest.raises(UsageError, match="quantizes no node"):
        export(model, replace(card, policy={"name": "none", "rules": [{"disable": "*"}]}), tmp_path)
    for rule, says in (
        (Rule(nodes=("role:gemm_input",), bits=4), "fewer than 8 bits.*_input_quantizer"),
        (Rule(nodes=("role:gemm_input",), narrow_range=True), "narrow range.*_input_quantizer"),
    ):
        with pytest.raises(SwinQuantError, match=says):
            export(model, replace(card, policy=load_policy("qdq").and_then(rule).to_dict()), tmp_path)
    assert not list(tmp_path.iterdir())
