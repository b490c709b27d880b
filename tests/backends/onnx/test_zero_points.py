"""Zero points: uint8 pairs with fake-quant's levels; for engines without, a middle subtracted before an int8 pair."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import share

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.registry import engines
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.policy import Policy, Rule, apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import State
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
            ends = zip(pair, ("images", "q"), ("q", "y"), strict=True)
            nodes = [onnx.helper.make_node(one.op_type, [a, *pair[0].input[1:]], [b]) for one, a, b in ends]
            graph = onnx.helper.make_graph(
                nodes, "pair",
                [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n"])],
                [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])],
                [tensors[each] for each in pair[0].input[1:]],
            )  # fmt: skip
            alone = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
            node.state = type(node.state).QUANTIZE
            assert np.array_equal(run(alone, x)["y"], node(x).numpy()), name


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "engine"), [("swin", "onnxruntime"), ("swinv2", "openvino")])
def test_our_engines_agree(kind, engine, exported, images, assert_quantized_alike, exact_on):
    pytest.importorskip(engine)
    if engine == "openvino":  # our engine makes ONNX Runtime use its exact kernels
        exact_on(engine)
    loaded = engines()[engine].loader(exported(kind, POLICY, target=engine), EngineOptions(threads=1))
    assert_quantized_alike(loaded(images).numpy(), kind, POLICY)


def test_a_range_without_lower_end_is_refused(calibrated, tmp_path):
    model, card = calibrated("swin", POLICY)
    model.layers[0].blocks[0].mlp.fc2._input_quantizer.bounds = None
    with pytest.raises(SwinQuantError, match=r"1 of \d+ nodes have no lower end.*blocks.0.mlp.fc2._input_quantizer"):
        export(model, card, tmp_path)


CENTRED = "tensorrt-centred"


@KINDS
def test_a_file_for_tensorrt_is_symmetric_and_computes_what_zero_points_do(
    kind, exported, run, images, assert_quantized_alike
):
    file = exported(kind, CENTRED, target="tensorrt", float_type="float32").file
    proto = onnx.load(file)
    zeros = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    pairs = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert pairs and all(zeros[node.input[2]].dtype == np.int8 and not zeros[node.input[2]].any() for node in pairs)
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    behind_gelu = [node for node in pairs if node.name.rpartition(".")[0].endswith("mlp.fc2._input_quantizer")]
    assert {makers[node.input[0]] for node in behind_gelu} == {"Sub"}
    assert_quantized_alike(run(file, images)["logits"], kind, CENTRED)


def test_only_what_lies_behind_gelu_has_another_grid(tiny_model, use_policy):
    nodes = {}
    for policy in ("tensorrt", CENTRED):
        model = tiny_model("swin")
        use_policy(model, policy)
        nodes[policy] = {name: node.setting for name, node in enabled_nodes(model).items()}
    assert nodes["tensorrt"].keys() == nodes[CENTRED].keys()
    differ = {name for name, each in nodes[CENTRED].items() if each != nodes["tensorrt"][name]}
    assert differ and all(name.endswith("mlp.fc2._input_quantizer") for name in differ)


@given(low=st.floats(-2, 0), high=st.floats(0.1, 8), bias=st.booleans(), seed=st.integers(0, 99))
def test_a_linear_gives_what_fake_quant_with_a_zero_point_gives(low, high, bias, seed):
    """Up to the order of sums, and inputs between two levels, which may round either way."""
    torch.manual_seed(seed)
    layer = QuantLinear(16, 5, bias=bias)
    policy = Policy("p", (Rule(enable=("role:gemm_input", "role:gemm_weight")),
                          Rule(nodes=("role:gemm_input",), symmetric=False)))  # fmt: skip
    model = torch.nn.Sequential(layer)
    apply_policy(model, policy)
    node = layer._input_quantizer
    node.amax, node.bounds = max(-low, high), (low, high)
    layer._weight_quantizer.amax = layer.weight.detach().abs().max()
    lowered = Linear(layer, centred=True)
    assert lowered._input_quantizer.zero_point is None
    step = (high - low) / 255
    x = torch.empty(7, 16).uniform_(low - 1, high + 1)
    x = x[((x / step).frac().abs() - 0.5).abs().amin(1) > 1e-3]
    for each in (node, layer._weight_quantizer):
        each.state = State.QUANTIZE
    with torch.no_grad():
        torch.testing.assert_close(lowered(x), layer(x), rtol=1e-5, atol=1e-5 * max(high, 1))


def test_where_no_bias_can_give_it_back_the_node_is_named(calibrated, tmp_path):
    for rule, found in (
        (Rule(nodes=("role:matmul_input",), symmetric=False), "attn.matmul_q_input"),
        (Rule(enable=("*.mlp.fc2._aftergemm_quantizer",)), "mlp.fc2._input"),
    ):
        model, card = calibrated("swin", "tensorrt")
        card = replace(card, policy=load_policy(CENTRED).and_then(rule).to_dict())
        with pytest.raises(UsageError, match=rf"tensorrt takes no zero points but .*{found}_quantizer.*without"):
            export(model, card, tmp_path, OnnxOptions(target="tensorrt"))
        assert not list(tmp_path.iterdir())
