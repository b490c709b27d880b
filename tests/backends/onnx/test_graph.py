"""Changes of a finished graph keep what it computes, and translations are what torch computes, by ONNX Runtime on small
graphs."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import swin_quant as sq
from swin_quant.backends.onnx.graph import finish
from swin_quant.backends.onnx.operators import translations
from swin_quant.backends.onnx.pairs import fit_biases, pad_in_convolutions, share_pairs
from swin_quant.base.errors import UsageError

onnxruntime = pytest.importorskip("onnxruntime")
X = np.random.default_rng(0).normal(size=(1, 2, 6, 5)).astype(np.float32)


def graph_of(nodes, **constants):
    """A graph from `x`, [1, 2, 6, 5], to `y`."""
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)
    made = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([helper.make_node(kind, *ends, **more) for kind, *ends, more in nodes], "g", [given],
                              [made], held)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def changed(proto, change):
    """The operators of the changed graph; it computes what the graph did."""
    model = ir.from_proto(proto)
    change(model.graph)
    wanted, found = (
        onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]
        for one in (proto, ir.to_proto(model))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(("zero", "pairs"), [(128, 1), (0, 2)])
def test_one_pair_serves_where_scale_and_zero_point_are_equal(zero, pairs):
    nodes = [
        ("QuantizeLinear", ["x", "s", "a"], ["p"], {}),
        ("DequantizeLinear", ["p", "s", "a"], ["one"], {}),
        ("QuantizeLinear", ["x", "s", "b"], ["q"], {}),
        ("DequantizeLinear", ["q", "s", "b"], ["other"], {}),
        ("Add", ["one", "other"], ["y"], {}),
    ]
    proto = graph_of(nodes, s=np.float32(0.02), a=np.uint8(128), b=np.uint8(zero))
    assert changed(proto, share_pairs).count("QuantizeLinear") == pairs


@pytest.mark.parametrize(
    ("around", "own", "pads"),
    [
        ([1, 0, 0, 2], [0, 0, 0, 0], 0),
        ([1, 0, 0, 2], [1, 1, 2, 1], 0),
        ([1, 0, 0, -1], [1, 1, 1, 1], 1),  # it cuts off, which no convolution does
    ],
)
def test_a_convolution_adds_the_zeros_around_its_map_to_its_own(around, own, pads):
    top, left, bottom, right = around
    nodes = [("Pad", ["x", "by"], ["wide"], {}), ("Conv", ["wide", "w"], ["y"], {"pads": own})]
    weight = np.random.default_rng(1).normal(size=(3, 2, 3, 3)).astype(np.float32)
    proto = graph_of(nodes, by=np.int64([0, 0, top, left, 0, 0, bottom, right]), w=weight)
    assert changed(proto, pad_in_convolutions).count("Pad") == pads


@pytest.mark.parametrize(("axis", "fits"), [(2, True), (3, False)])
def test_opset_17_splits_into_equal_parts_alone(axis, fits):
    nodes = [
        ("Split", ["x"], ["a", "b"], {"axis": axis, "num_outputs": 2}),
        ("Concat", ["b", "a"], ["y"], {"axis": axis}),
    ]
    proto = graph_of(nodes)
    assert finish(ir.from_proto(proto), 17, asked=False) == (17 if fits else 18)
    if not fits:
        with pytest.raises(UsageError, match="opset 17: has no Split as this network needs it"):
            finish(ir.from_proto(proto), 17)


def test_each_weight_keeps_a_zero_point_of_its_own():
    """ONNX Runtime's remedy for saturation turns both into uint8, and loads no file in which two weights share one."""
    nodes = [
        ("DequantizeLinear", ["a", "s", "val_0"], ["first"], {}),
        ("DequantizeLinear", ["b", "s", "val_1"], ["second"], {}),
        ("MatMul", ["x", "first"], ["z"], {}),
        ("MatMul", ["z", "second"], ["y"], {}),
    ]
    zero, (a, b) = np.int8(0), np.random.default_rng(2).integers(-128, 128, (2, 5, 5), np.int8)
    model = ir.from_proto(graph_of(nodes, a=a, b=b, s=np.float32(0.02), val_0=zero, val_1=zero))
    finish(model, 17)
    pairs = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len({node.inputs[2].name for node in pairs}) == len(pairs) == 2


def test_a_bias_fits_int32_where_its_weights_are_nearly_zero():
    """ONNX Runtime rounds it by the product of both scales, and saturates it in silence."""
    nodes = [
        ("QuantizeLinear", ["x", "s", "zero"], ["p"], {}),
        ("DequantizeLinear", ["p", "s", "zero"], ["data"], {}),
        ("DequantizeLinear", ["levels", "scales"], ["weight"], {"axis": 0}),
        ("Conv", ["data", "weight", "bias"], ["made"], {}),
        ("QuantizeLinear", ["made", "t", "zero"], ["q"], {}),
        ("DequantizeLinear", ["q", "t", "zero"], ["y"], {}),
    ]
    levels = np.random.default_rng(3).integers(-127, 128, (3, 2, 1, 1), np.int8)
    scales, bias = np.float32([1e-9, 0.01, 0.02]), np.float32([0.5, -0.5, 0.1])
    given = {"s": np.float32(0.02), "t": np.float32(0.1), "zero": np.int8(0)}
    proto = graph_of(nodes, **given, levels=levels, scales=scales, bias=bias)
    model = ir.from_proto(proto)
    fit_biases(model.graph)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    weight = levels * scales[:, None, None, None]
    data = np.clip(np.rint(X / np.float32(0.02)), -128, 127) * 0.02
    wanted = np.einsum("bihw,oi->bohw", data, weight[..., 0, 0]) + bias[:, None, None]
    np.testing.assert_allclose(session.run(None, {"x": X})[0], wanted, atol=0.06)


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_of_volumes_need_no_bias(bias):
    torch.manual_seed(0)
    module, x = nn.Conv3d(4, 6, (3, 1, 2), (2, 1, 1), (1, 0, 1), groups=2, bias=bias), torch.randn(2, 4, 5, 4, 6)
    program = torch.onnx.export(
        module.eval(), (x,), dynamo=True, opset_version=18, custom_translation_table=translations(18), verbose=False
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Parts(nn.Module):
    """Splits a table that does not depend on the input."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        factors, offsets = (self.table * 2).split(4)
        return (self.layer(x) * factors + offsets).mean((2, 3))


def test_the_optimizer_says_nothing_of_a_split_that_it_does_not_fold(tmp_path, caplog):
    model, x = sq.wrap(Parts(), 8), torch.randn(2, 3, 8, 8)
    sq.calibrate(model, [x], "qdq", passes=[])
    run = sq.export(model, "onnx", tmp_path).load("onnxruntime")
    assert not [one.getMessage() for one in caplog.records if one.name.startswith("onnxscript")]
    with torch.inference_mode():
        torch.testing.assert_close(torch.as_tensor(run(x)), model(x), rtol=1e-3, atol=1e-3)
