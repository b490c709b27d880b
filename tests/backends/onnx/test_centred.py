"""Engines without zero points: the middle of a range is subtracted before a pair, and the next bias restores it."""

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
from swin_quant.base.errors import UsageError
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.policy import Policy, Rule, apply_policy, enabled_nodes, load_policy
from swin_quant.quant.quantizer import State

POLICY = "tensorrt-centred"
KINDS = pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))


@pytest.mark.slow
@KINDS
def test_a_file_for_tensorrt_is_symmetric_and_computes_what_zero_points_do(
    kind, exported, run, images, assert_quantized_alike
):
    file = exported(kind, POLICY, target="tensorrt", float_type="float32").file
    proto = onnx.load(file)
    zeros = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    pairs = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert pairs and all(zeros[node.input[2]].dtype == np.int8 and not zeros[node.input[2]].any() for node in pairs)
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    behind_gelu = [node for node in pairs if node.name.rpartition(".")[0].endswith("mlp.fc2._input_quantizer")]
    assert {makers[node.input[0]] for node in behind_gelu} == {"Sub"}
    assert_quantized_alike(run(file, images)["logits"], kind, POLICY)


@pytest.mark.nightly
@pytest.mark.kernels
def test_a_float16_body_subtracts_in_float16(exported, run, images, assert_quantized_alike):
    artifact = exported("swin", POLICY, target="tensorrt")
    assert_quantized_alike(run(artifact.file, images)["logits"].astype(np.float32), "swin", POLICY)


def test_only_what_lies_behind_gelu_has_another_grid(tiny_model, use_policy):
    nodes = {}
    for policy in ("tensorrt", POLICY):
        model = tiny_model("swin")
        use_policy(model, policy)
        nodes[policy] = {name: node.setting for name, node in enabled_nodes(model).items()}
    assert nodes["tensorrt"].keys() == nodes[POLICY].keys()
    differ = {name for name, each in nodes[POLICY].items() if each != nodes["tensorrt"][name]}
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
        card = replace(card, policy=load_policy(POLICY).and_then(rule).to_dict())
        with pytest.raises(UsageError, match=rf"tensorrt takes no zero points but .*{found}_quantizer.*without"):
            export(model, card, tmp_path, OnnxOptions(target="tensorrt"))
        assert not list(tmp_path.iterdir())
