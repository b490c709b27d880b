"""Products of ONNX graphs by type, and operators with their shapes and MACs."""

import json

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.base.errors import SwinQuantError

CHANNELS, HEADS, TOKENS = 64, 2, 16
FLOAT8 = ml_dtypes.float8_e4m3fn


class Draft:
    """A graph under construction: `add` a node and get its output."""

    def __init__(self, body=np.float16, tokens=TOKENS, channels=CHANNELS):
        self.body, self.nodes, self.constants, self.sizes = body, [], {}, [tokens, channels]

    def const(self, name, value):
        self.constants[name] = np.asarray(value)
        return name

    def add(self, op, inputs, name, outputs=None, **attributes):
        outputs = outputs or [f"{name}.out"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attributes))
        return outputs[0]

    def pair(self, x, name, kind=np.int8, zero=0, scale=0.05):
        scale = self.const(f"{name}.scale", np.asarray(scale, self.body))
        zero = self.const(f"{name}.zero", np.full(self.constants[scale].shape, zero, kind))
        return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, scale, zero], name), scale, zero],
                        f"{name}.dq")  # fmt: skip

    def linear(self, x, name, rows, columns, quantized=True, axis=1):
        if not quantized:
            return self.add("MatMul", [x, self.const(f"{name}.weight", np.ones((rows, columns), self.body))], name)
        x = self.pair(x, f"{name}._input_quantizer")
        size = (rows, columns)[axis]
        scale = self.const(f"{name}.weight.scale", np.full(size, 0.01, self.body))
        weight = [self.const(f"{name}.weight", np.ones((rows, columns), np.int8)), scale,
                  self.const(f"{name}.weight.zero", np.zeros(size, np.int8))]  # fmt: skip
        return self.add("MatMul", [x, self.add("DequantizeLinear", weight, f"{name}.weight.dq", axis=axis)], name)

    def model(self, output, opset=20):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.body))
        info = helper.make_tensor_value_info
        graph = helper.make_graph(self.nodes, "g", [info("x", kind, ["batch", *self.sizes])],
                                  [info(output, kind, ["batch", self.sizes[0], None])],
                                  [numpy_helper.from_array(v, k) for k, v in self.constants.items()])  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def block(broken=(), body=np.float16, heads=HEADS, tokens=TOKENS, channels=CHANNELS):
    """One attention with its two linears and a residual sum; `broken` names the inputs that are not int8."""
    d = Draft(body, tokens, channels)
    name = "layers.1.blocks.0"
    depth = channels // heads
    shape = d.const("shape", np.array([0, 0, 3, heads, depth], np.int64))
    x = d.add("LayerNormalization", ["x", d.const("w", np.ones(channels, body)), d.const("b", np.ones(channels, body))],
              f"{name}.norm1", axis=-1)  # fmt: skip
    x = d.linear(x, f"{name}.attn.qkv", channels, 3 * channels)
    x = d.add("Transpose", [d.add("Reshape", [x, shape], "view")], "heads", perm=[2, 0, 3, 1, 4])
    parts = [f"{part}.part" for part in "qkv"]
    d.add("Split", [x], "split", parts, axis=0, num_outputs=3)
    axis = d.const("axis", np.array([0], np.int64))
    q, k, v = (d.add("Squeeze", [part, axis], part) for part in parts)
    kind, zero = (np.uint8, 128) if "asymmetric" in broken else (np.int8, 0)
    other = FLOAT8 if "k float8" in broken or "float8" in broken else kind
    kind = FLOAT8 if "float8" in broken else kind
    q, v = (
        t if f"{n} float" in broken else d.pair(t, f"{name}.attn.matmul_{n}_input_quantizer", kind, zero)
        for n, t in (("q", q), ("v", v))
    )
    k = d.pair(k, f"{name}.attn.matmul_k_input_quantizer", other, zero)
    k = d.add("Transpose", [k], "k.t", perm=[0, 1, 3, 2])
    x = d.add("MatMul", [q, k], f"{name}.attn.qk")
    x = d.add("Add", [x, d.const("mask", np.ones((heads, tokens, tokens), body))], "bias")
    x = d.add("Softmax", [x], f"{name}.attn.softmax", axis=-1)
    x = d.pair(x, f"{name}.attn.matmul_a_input_quantizer", kind, scale=1 / 127, zero=zero)
    x = d.add("MatMul", [x, v], f"{name}.attn.av")
    x = d.add("Transpose", [x], "join", perm=[0, 2, 1, 3])
    x = d.add("Reshape", [x, d.const("flat", np.array([0, 0, channels], np.int64))], "flatten")
    x = d.linear(x, f"{name}.attn.proj", channels, channels)
    return d.model(d.add("Add", [x, "x"], f"{name}.add1"))


def test_every_product_of_a_block_is_found():
    model = block()
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((2, TOKENS, CHANNELS), np.float16)})[0].shape == (2, TOKENS, CHANNELS)
    report = inspect_model(model)
    assert (report.body, report.opset, report.pairs, report.asymmetric) == ("float16", 20, (6, 8), [])
    assert [(gemm.name, gemm.kind, gemm.format == "int8") for gemm in report.gemms] == [
        ("layers.1.blocks.0.attn.qkv", "linear", True),
        ("layers.1.blocks.0.attn.qk", "matmul", True),
        ("layers.1.blocks.0.attn.av", "matmul", True),
        ("layers.1.blocks.0.attn.proj", "linear", True),
    ]
    assert report.float_ops == {"Add": 2, "LayerNormalization": 1, "Softmax": 1}
    record = json.loads(json.dumps(report.to_dict()))
    assert record["int8_gemms"] == 4 and record["pairs"] == [6, 8] and record["gemms"][1]["inputs"] == ["int8"] * 2


@pytest.mark.parametrize("broken, inputs", [
    ("q float", ("float16", "int8")), ("v float", ("int8", "float16")), ("k float8", ("int8", "float8"))
])  # fmt: skip
def test_a_product_of_two_types_runs_in_float(broken, inputs):
    (gemm,) = [gemm for gemm in inspect_model(block([broken])).gemms if gemm.format is None]
    assert gemm.inputs == inputs and gemm.kind == "matmul"


def test_float8_is_told_from_int8():
    model = block(["float8"])
    onnx.checker.check_model(model, full_check=True)
    report = inspect_model(model)
    assert [gemm.format for gemm in report.gemms] == ["int8", "float8", "float8", "int8"]
    assert report.asymmetric == [] and report.to_dict()["float8_gemms"] == 2


def test_integer_operators_and_casts_are_looked_through():
    d = Draft(np.float32)
    x = d.add("Cast", [d.pair("x", "quantizer")], "to16", to=TensorProto.FLOAT16)
    weight = d.pair(d.const("weight", np.ones((CHANNELS, CHANNELS), np.float32)), "weight_pair")
    x = d.add("MatMul", [x, d.add("Cast", [weight], "half", to=TensorProto.FLOAT16)], "fc")
    levels = d.add(
        "QuantizeLinear", [d.add("Cast", [x], "wide", to=TensorProto.FLOAT), d.const("s", np.float32(1))], "q"
    )
    x = d.add("MatMulInteger", [levels, d.const("levels", np.ones((CHANNELS, 8), np.uint8))], "fc.int8")
    model = d.model(d.add("Cast", [x], "out", to=TensorProto.FLOAT))
    assert [(gemm.name, gemm.format) for gemm in inspect_model(model).gemms] == [
        ("fc", "int8"), ("fc.int8", "int8")]  # fmt: skip


def test_hostile_graphs_end_in_one_error_or_a_report():
    d = Draft(np.float32)
    d.add("MatMul", ["b.out", "b.out"], "a")
    cycle = d.model(d.add("MatMul", ["a.out", "a.out"], "b"))
    assert [gemm.node for gemm in inspect_model(cycle).gemms] == ["a", "b"]
    d = Draft(np.float32)
    x = d.add("DequantizeLinear", ["x"], "half")
    d.add("MatMul", [x, x], "none", [""])
    report = inspect_model(d.model(d.add("MatMul", [x, x], "fc")))
    assert [gemm.inputs for gemm in report.gemms] == [("unknown", "unknown")] * 2
    with pytest.raises(SwinQuantError, match="the ONNX graph is empty"):
        inspect_model(onnx.ModelProto())
    d, x = Draft(np.float32), "x"
    for number in range(3000):
        x = d.add("Identity", [x], f"i{number}")
    assert len(inspect_model(d.model(d.linear(x, "fc", CHANNELS, 8))).gemms) == 1
