"""The float16 variant: the type of every tensor, which stay float32, and the distance to float32."""

from dataclasses import replace

import onnx
import pytest
import torch
from cards_of_results import CALIBRATION
from decibels import sqnr
from nightly import share

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx.layers import SMALLEST_SCALE
from swin_quant.backends.onnx.network import network

pytestmark = pytest.mark.slow  # an export for each case
KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])
FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
# The last four normalise V2's q and k
IN_FLOAT32 = {"LayerNormalization", "ReduceMean", "ReduceL2", "Clip", "Div", "Mul"}


def types(graph_or_model):
    """Tensor -> element type, for the whole graph."""
    graph = onnx.shape_inference.infer_shapes(graph_or_model, strict_mode=True, check_type=True).graph
    infos = (*graph.input, *graph.output, *graph.value_info)
    found = {info.name: info.type.tensor_type.elem_type for info in infos}
    return found | {tensor.name: tensor.data_type for tensor in graph.initializer}


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
@pytest.mark.parametrize("precision", share(["int8", "float"], 2))
def test_every_tensor_has_the_type_it_should(kind, precision, exported):
    artifact = exported(kind, "tensorrt", target="tensorrt", precision=precision)
    assert artifact.file.stem == f"{kind}_tiny_{'int8' if precision == 'int8' else 'fp16'}_tensorrt"
    model = onnx.load(artifact.file)
    of = types(model)
    assert of["images"] == of["logits"] == FLOAT
    for node in model.graph.node:
        float_types = {of[name] for name in (*node.input, *node.output) if name and of[name] in (FLOAT, HALF)}
        if node.op_type in IN_FLOAT32:
            assert float_types == {FLOAT}, node.name
        elif node.op_type == "Cast":
            assert float_types == {FLOAT, HALF}, node.name
        elif "images" not in node.input and not node.name.startswith("patch_embed"):
            assert float_types == {HALF}, node.name
    weights = {of[t.name] for t in model.graph.initializer if t.name.endswith("_weight_quantizer.values")}
    assert weights == ({onnx.TensorProto.INT8, HALF} if precision == "int8" else {HALF})


@pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
def test_it_is_near_the_float32_graph(kind, exported, run, fake_quant, images):
    half, full = (
        run(exported(kind, "tensorrt", target=target, precision="float").file, images)["logits"]
        for target in ("tensorrt", "portable")
    )
    assert sqnr(full, half) > 45
    quantized, floats = fake_quant(kind, images, "tensorrt")
    both = run(exported(kind, "tensorrt", target="tensorrt").file, images)["logits"]
    assert sqnr(quantized, both) > sqnr(floats, quantized)  # nearer to fake-quant than the float model


def test_input_and_output_in_float16(calibrated, tmp_path, run, images):
    model, card = calibrated("swin", "tensorrt")
    file = export(model, card, tmp_path, OnnxOptions(target="tensorrt", io_type="float16")).file
    of = types(onnx.load(file))
    assert of["images"] == of["logits"] == HALF
    assert run(file, images.half())["logits"].dtype == "float16"


BLOCK = "layers.0.blocks.1"
WIDE = {  # a node whose values overflow -> what is then float32, and what stays float16
    "mlp.fc1._aftergemm_quantizer": ({"mlp.fc1"}, {"mlp.fc2", "attn.qkv", "attn"}),
    "mlp.fc2._input_quantizer": ({"mlp.fc1", "mlp.fc2"}, {"attn.proj", "attn"}),
    "add2_local_input_quantizer": ({"mlp.fc2"}, {"mlp.fc1", "attn"}),
    "softmax_input": ({"attn"}, {"attn.qkv", "attn.proj", "mlp.fc1"}),
    "matmul_v_input": ({"attn", "attn.qkv"}, {"attn.proj"}),
    "layernorm_input1_quantizer": (set(), {"attn", "mlp.fc1"}),
}


@KINDS
@pytest.mark.parametrize("node", share(WIDE, 3))
def test_what_overflows_stays_float32(kind, node, calibrated):
    model, _ = calibrated(kind)
    name = f"{BLOCK}.attn.{node}_quantizer" if "." not in node and not node.endswith("quantizer") else f"{BLOCK}.{node}"
    model.get_submodule(name)  # raises if there is no such node
    exported = network(model, OnnxOptions(float_type="float16"), None, [name])
    wide, half = WIDE[node]
    if node == "layernorm_input1_quantizer":  # V1: of the residual stream; V2: of attention's output
        wide = {"attn.proj"} if kind == "swinv2" else wide
        assert exported.patch_embed.stream == (torch.float32 if kind == "swin" else torch.float16)
    assert {layer for layer in wide | half if exported.get_submodule(f"{BLOCK}.{layer}").dtype == torch.float32} == wide


@pytest.mark.parametrize("node", ["add1_residual_input_quantizer", "add2_residual_input_quantizer"])
def test_a_residual_stream_that_overflows_is_float32_to_the_end(node, calibrated, tmp_path, run, images):
    model, card = calibrated("swin", "tensorrt")
    calibration = {"beyond_half": [f"{BLOCK}.{node}"]}
    card = replace(card, calibration={**CALIBRATION, **calibration})
    file = export(model, card, tmp_path, OnnxOptions(target="tensorrt")).file
    of, graph = types(onnx.load(file)), onnx.load(file).graph
    sums = [
        n for n in graph.node if n.op_type == "Add" and n.name.rpartition(".")[0].endswith(("blocks.0", "blocks.1"))
    ]
    assert len(sums) == 6 and all(of[add.output[0]] == FLOAT for add in sums)
    assert {of[n.output[0]] for n in graph.node if n.op_type == "MatMul"} == {HALF}


@pytest.mark.parametrize("scale", [SMALLEST_SCALE / 2, 2.0**16])
def test_a_layer_with_a_scale_that_float16_holds_badly_stays_float32_and_is_named(scale, calibrated, caplog):
    model, _ = calibrated("swin")
    layer = model.get_submodule(f"{BLOCK}.mlp.fc1")
    layer._input_quantizer.amax = 127 * scale
    exported = network(model, OnnxOptions(float_type="float16"), None)
    assert exported.get_submodule(f"{BLOCK}.mlp.fc1").dtype == torch.float32
    assert exported.get_submodule(f"{BLOCK}.mlp.fc2").dtype == torch.float16
    assert f"1 layers stay float32, because float16 cannot hold their scales: {BLOCK}.mlp.fc1" in caplog.text
