"""Zero points in ONNX: uint8 pairs with fake-quant's levels, on engines that support them, and refused for others."""

import numpy as np
import onnx
import pytest
import torch
from nightly import share

from swin_quant.backends.onnx.export import export
from swin_quant.backends.registry import engines
from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.policy import enabled_nodes
from swin_quant.score.options import EngineOptions

KINDS = pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))
POLICY = "zero points"


@pytest.mark.kernels
@KINDS
def test_pairs_are_of_uint8_around_the_zero_point_of_the_node(kind, graph, calibrated):
    graph, (model, _) = graph(kind, POLICY), calibrated(kind, POLICY)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    used = {node.name.rpartition(".")[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    found = {name: tensors[node.input[2]] for name, node in used.items()}
    for name, node in enabled_nodes(model).items():
        if name in found and not node.setting.symmetric:
            assert found[name].dtype == np.uint8 and found[name] == -node.grid[0]
            low, high = node.bounds.tolist()
            assert tensors[f"{name}.scale"] == pytest.approx((high - low) / 255, rel=1e-6)
        elif name in found:
            assert found[name].dtype == np.int8 and found[name] == 0
    gelu = {int(zero) for name, zero in found.items() if name.endswith("mlp.fc2._input_quantizer")}
    softmax = {int(zero) for name, zero in found.items() if name.endswith("matmul_a_input_quantizer")}
    assert softmax == {0} and all(0 < zero < 128 for zero in gelu) and gelu


@pytest.mark.kernels
@KINDS
def test_every_level_is_fake_quants(kind, exported, calibrated, run, images):
    """Each pair of the file, run alone by ONNX Runtime, equals its node's output to the bit."""
    model, _ = calibrated(kind, POLICY)
    proto = onnx.load(exported(kind, POLICY).file)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    x = torch.linspace(-3, 3, 20_001)
    for name, node in enabled_nodes(model).items():
        if not node.setting.symmetric:
            pair = [found for found in proto.graph.node if found.name.rpartition(".")[0] == name]
            nodes = [onnx.helper.make_node(*step) for step in _alone(pair)]
            graph = onnx.helper.make_graph(
                nodes, "pair",
                [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n"])],
                [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])],
                [tensors[each] for each in pair[0].input[1:]],
            )  # fmt: skip
            alone = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
            node.state = type(node.state).QUANTIZE
            assert np.array_equal(run(alone, x)["y"], node(x).numpy()), name


def _alone(pair):
    first, second = pair
    return (first.op_type, ["images", *first.input[1:]], ["q"]), (second.op_type, ["q", *first.input[1:]], ["y"])


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "engine"), [("swin", "onnxruntime"), ("swinv2", "openvino")])
def test_our_engines_agree(kind, engine, exported, images, assert_quantized_alike, exact_on):
    pytest.importorskip(engine)
    if engine == "openvino":  # our engine makes ONNX Runtime use its exact kernels
        exact_on(engine)
    loaded = engines()[engine].loader(exported(kind, POLICY, target=engine), EngineOptions(threads=1))
    assert_quantized_alike(loaded(images).numpy(), kind, POLICY)


def test_tensorrt_refuses_them_by_name(assert_refused):
    assert_refused(r"tensorrt takes no zero points.*layers.0.blocks.0.*without", policy=POLICY, target="tensorrt")


def test_a_range_without_lower_end_is_refused(calibrated, tmp_path):
    model, card = calibrated("swin", POLICY)
    model.layers[0].blocks[0].mlp.fc2._input_quantizer.bounds = None
    with pytest.raises(SwinQuantError, match=r"1 of \d+ nodes have no lower end.*blocks.0.mlp.fc2._input_quantizer"):
        export(model, card, tmp_path)
