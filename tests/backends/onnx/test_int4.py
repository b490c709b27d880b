"""Weights stored as INT4: fake-quant's levels, two to a byte, and engines that compute the same with them."""

import os
from dataclasses import replace

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from nightly import share

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx_reader.file import open_onnx
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.registry import engine_named
from swin_quant.base.errors import UsageError
from swin_quant.quant.fake_quant import fake_quant as simulate
from swin_quant.quant.policy import Rule, apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import Role

BLOCKS = "w4a16, blocks"
ALL = pytest.mark.parametrize(("kind", "policy"), share([("swin", "w4a16"), ("swinv2", "w4a8"), ("swin", BLOCKS)], 2))


def weights(model):
    return {name: node for name, node in enabled_nodes(model).items() if node.role is Role.GEMM_WEIGHT}


@ALL
def test_the_levels_are_fake_quant_s_two_in_a_byte_as_card_and_graph_say(kind, policy, exported, calibrated):
    model, _ = calibrated(kind, policy)
    artifact = exported(kind, policy, int4_weights=True)
    assert artifact.file.name == f"{kind}_tiny_int4.onnx"
    assert artifact.record["precision"] == ("W4A8" if policy == "w4a8" else "W4A16")
    assert artifact.record["options"]["int4_weights"] and artifact.record["options"]["opset"] == 21
    assert open_onnx(artifact.file).opset == 21
    proto = onnx.load(artifact.file)
    given = {gemm.inputs for gemm in inspect_model(proto).gemms if gemm.kind == "linear" and "int4" in gemm.inputs}
    assert given == {("int8", "int4") if policy == "w4a8" else ("float32", "int4")}
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name, node in weights(model).items():
        weight = model.get_submodule(name.rpartition(".")[0]).weight.detach()
        amax = node.range_for(weight)
        stored = tensors[f"{name}.values"]
        assert stored.data_type == onnx.TensorProto.INT4 and len(stored.raw_data) == -(-weight.numel() // 2)
        levels = onnx.numpy_helper.to_array(stored).astype(np.float32).T
        assert np.array_equal(levels, (simulate(weight, amax, -8, 7) / (amax / 7)).round().numpy()), name


@pytest.mark.kernels
@ALL
def test_onnx_s_own_reference_computes_the_same(kind, policy, exported, images, assert_quantized_alike):
    from onnx.reference import ReferenceEvaluator

    found = ReferenceEvaluator(onnx.load(exported(kind, policy, int4_weights=True).file))
    assert_quantized_alike(found.run(None, {"images": images.numpy()})[0], kind, policy)


@ALL
@pytest.mark.parametrize("engine", [pytest.param("onnxruntime", marks=pytest.mark.kernels), "openvino"])
def test_engines_compute_the_same(kind, policy, engine, exported, images, fake_quant):
    pytest.importorskip(engine)
    if engine == "openvino" and os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        pytest.skip("OpenVINO sees this CPU's AVX-512 and asks for kernels that oneDNN must not use")
    artifact = exported(kind, policy, int4_weights=True)
    backend = engine_named(engine)
    logits = backend.loader(artifact)(images).numpy()
    assert np.abs(logits - fake_quant(kind, images, policy)[0]).mean() < backend.tolerances.quantized


@pytest.mark.nightly
@pytest.mark.kernels
def test_weights_of_more_bits_beside_them_stay_int8(calibrated, tmp_path, run, images):
    model, card = calibrated("swin", "w4a16")
    mixed = load_policy("w4a16").and_then(Rule(nodes=("*.fc1._weight_quantizer",), bits=6))
    apply_policy(model, mixed)
    card = card.__class__(card.name, {}, card.preprocess, policy=mixed.to_dict())
    artifact = export(model, card, tmp_path, OnnxOptions(int4_weights=True))
    types = {t.name: t.data_type for t in onnx.load(artifact.file).graph.initializer if t.name.endswith(".values")}
    for name, node in weights(model).items():
        assert types[f"{name}.values"] == (onnx.TensorProto.INT8 if node.setting.bits == 6 else onnx.TensorProto.INT4)
    assert np.isfinite(run(artifact.file, images)["logits"]).all()


def test_blocks_of_a_row_have_scales_of_their_own(exported, calibrated):
    model, _ = calibrated("swin", BLOCKS)
    proto = onnx.load(exported("swin", BLOCKS, int4_weights=True).file)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    read = {node.input[0]: node for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    for name in [name for name in weights(model) if ".qkv." not in name]:  # qkv's scales include attention's
        weight = model.get_submodule(name.rpartition(".")[0]).weight.detach().numpy()
        largest = np.abs(weight.reshape(len(weight), -1, 16)).max(-1)
        np.testing.assert_allclose(tensors[f"{name}.scale"], largest.T / 7, rtol=1e-6)
        given = {one.name: one.i for one in read[f"{name}.values"].attribute}
        assert given == {"axis": 0, "block_size": 16}


@pytest.mark.parametrize(("flags", "says"), [({}, "give int4_weights"), ({"int4_weights": True}, "more than 4 bits")])
def test_blocks_are_for_int4_files(flags, says, calibrated, tmp_path):
    model, card = calibrated("swin", BLOCKS)
    if flags:
        wide = load_policy("w4a16").and_then(Rule(nodes=("*.fc1._weight_quantizer",), bits=8, block=16))
        card = replace(card, policy=wide.to_dict())
    with pytest.raises(UsageError, match=says):
        export(model, card, tmp_path, OnnxOptions(**flags))
    assert not list(tmp_path.iterdir())


def test_onnx_runtime_multiplies_blocks_as_they_lie(exported):
    pytest.importorskip("onnxruntime")
    gemms = engine_named("onnxruntime").loader(exported("swin", BLOCKS, int4_weights=True)).details["gemms"]
    kinds = {name: kind for name, kind in gemms.items() if any(part in name for part in ("qkv", "proj", "fc"))}
    assert {kind for name, kind in kinds.items() if "patch_embed" not in name} == {"int4"}
