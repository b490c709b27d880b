"""ONNX for NPUs: 16-bit activations beside fake-quant, the form without tensors above rank 5, and the rules."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from decibels import sqnr
from nightly import share
from onnx.reference import ReferenceEvaluator

from swin_quant.backends.onnx.export import export
from swin_quant.backends.onnx_reader.npu_rules import NPUS, misfits
from swin_quant.backends.onnxruntime import engine as onnxruntime_engine
from swin_quant.backends.openvino import engine as openvino_engine
from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.policy import Rule, load_policy, quantizing

FORMS = [(policy, kind) for policy in ("qdq", "a16", "a16-qnn") for kind in ("swin", "swinv2")]
BANNED = {"Roll", "Where", "ScatterND", "ScatterElements", "Loop", "If", "Scan"}


@pytest.fixture
def written(exported, calibrated):
    """written(kind, policy, option=value ...) -> artifact, fake-quant's logits for two pictures, and the pictures."""

    def write(kind, policy, **options):
        model, _ = calibrated(kind, policy)
        images = torch.randn(2, *model.input_shape, generator=torch.Generator().manual_seed(4))
        with torch.inference_mode(), quantizing(model):
            return exported(kind, policy, **options), model(images), images

    return write


def one_by_one(engine, images):
    return torch.cat([engine(image[None]) for image in images])


def ranks(file):
    model = onnx.shape_inference.infer_shapes(onnx.load(file), strict_mode=True)
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return max(len(value.type.tensor_type.shape.dim) for value in values)


@pytest.mark.parametrize("policy, kind", share(FORMS, len(FORMS)))
def test_the_form_for_npus_computes_the_same_without_what_npus_lack(written, kind, policy):
    newest = {"opset": 20} if policy == "qdq" else {}  # GELU as one operator, as NPUs want it
    plain, expected, images = written(kind, policy, batch=1, **newest)
    artifact, _, _ = written(kind, policy, npu=True)
    assert artifact.file.name == f"{kind}_tiny_{'int8' if policy == 'qdq' else 'w8a16'}_npu.onnx"
    assert ranks(plain.file) > 5 >= ranks(artifact.file)
    assert not BANNED & {node.op_type for node in onnx.load(artifact.file).graph.node}
    assert {target: misfits(onnx.load(artifact.file), target) for target in NPUS} == {target: [] for target in NPUS}
    before, after = (one_by_one(onnxruntime_engine.load(one), images) for one in (plain, artifact))
    assert torch.equal(before, after)
    before, after = (one_by_one(openvino_engine.load(one), images) for one in (plain, artifact))
    assert sqnr(expected, after) == pytest.approx(sqnr(expected, before), abs=0.5)


def test_16_bits_are_uint16_pairs_and_nearly_the_model_with_rounded_weights(written, calibrated):
    artifact, expected, images = written("swin", "a16")
    model = onnx.load(artifact.file)
    zeros = {tensor.name: tensor for tensor in model.graph.initializer}
    pairs = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {zeros[node.input[2]].data_type for node in pairs} == {onnx.TensorProto.UINT16}
    assert artifact.record["precision"] == "W8A16" and artifact.record["options"]["opset"] == 21
    assert sqnr(expected, onnxruntime_engine.load(artifact)(images)) > 60
    alone, _ = calibrated("swin", "executorch")  # the same weights, float activations
    with torch.inference_mode(), quantizing(alone):
        assert sqnr(alone(images), expected) > 55


def test_qnn_s_policy_rounds_each_result_of_an_int8_weight_and_gives_a_weight_one_range(written):
    graph = onnx.load(written("swin", "a16-qnn", npu=True)[0].file).graph
    maker, dims = {node.output[0]: node for node in graph.node}, {one.name: list(one.dims) for one in graph.initializer}
    readers = {name: node.op_type for node in graph.node for name in node.input}
    products = [
        (node, maker[node.input[1]]) for node in graph.node if node.op_type == "MatMul" and node.input[1] in maker
    ]
    weighted = [(node, weight) for node, weight in products if weight.input[0] in dims]
    assert len(weighted) == 3 * 4 + 1  # linears of blocks and merging
    assert all(dims[weight.input[1]] == [] for _, weight in weighted)
    assert {readers[node.output[0]] for node, _ in weighted} == {"QuantizeLinear"}


def test_a_pair_of_16_bits_has_the_levels_of_onnx_s_reference(calibrated):
    """Each value as the reference implementation of QuantizeLinear rounds it, to the bit."""
    model, _ = calibrated("swin", "a16")
    node = model.layers[0].blocks[0].mlp.fc1._input_quantizer
    x = torch.linspace(float(node.bounds[0]) * 1.2, float(node.bounds[1]) * 1.2, 999)
    with torch.inference_mode(), quantizing(model):
        expected = node(x)
    scale, zero = float(node.range_for() / node.grid[1]), -node.grid[0]
    proto = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["": 21]>
    g (float[999] x) => (float[999] y) <float s = {{{scale!r}}}, uint16 z = {{{zero}}}>
    {{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }}""")
    (found,) = ReferenceEvaluator(proto).run(None, {"x": x.numpy()})
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(nodes=("role:gemm_input",), bits=12), "fewer than 8 bits, or 9 to 15"),
        (Rule(nodes=("role:gemm_weight",), bits=16), "weights have at most 8 bits, not 16"),
    ],
)
def test_other_bits_are_refused(calibrated, tmp_path, rule, said):
    model, card = calibrated("swin")
    with pytest.raises(SwinQuantError, match=said):
        export(model, replace(card, policy=load_policy("qdq").and_then(rule).to_dict()), tmp_path)


def test_misfits_are_listed_with_their_reasons():
    data = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 18]>
    g (float[batch, 2, 2] x) => (float[batch] d, float[batch] s, float[1, 1, 1, 1, 2] g)
    <bool c = {1}, int64[6] six = {0, 1, 2, 2, 1, 1}, int64[5] others = {1, 2, 3, 4, 5},
     float[1, 1, 1, 1, 1, 2] wide = {0, 0}, int64 zero = {0}>
    {
        [mask] w = Where(c, x, x)
        [det] d = Det(w)
        [windows] y = Reshape(x, six)
        [back] s = ReduceSum<keepdims = 0>(y, others)
        [constant] g = Gather(wide, zero)
    }""").SerializeToString()

    def found(target):
        lines = [one.split(": ") for one in misfits(onnx.ModelProto.FromString(data), target)]
        return [(where.split(" (")[0], why) for where, why, *_ in lines]

    is_open, six = ("x", "its shape is open"), "a tensor of rank 6, above 5"
    ranks = [(name, six) for name in ("windows", "back", "constant")]  # its result, its input, its constant
    assert found("qnn") == [is_open, ("det", "the operator is not in the target's list"), *ranks]
    assert found("openvino-npu") == [is_open, ("mask", "the operator is not taken, or not rightly"), *ranks]
