"""Products of ONNX graphs by type, and operators with their shapes and MACs."""

import json

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from drafts import Draft
from onnx import TensorProto

from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.base.errors import SwinQuantError

CHANNELS, HEADS, TOKENS = 64, 2, 16
FLOAT8 = ml_dtypes.float8_e4m3fn


def finished(draft, output):
    """The model from x [batch, TOKENS, CHANNELS] to an output."""
    return draft.model({"x": ["batch", TOKENS, CHANNELS]}, {output: ["batch", TOKENS, None]})


def linear(draft, x, name, columns):
    return draft.linear(x, name, np.ones((CHANNELS, columns)), steps=np.full(columns, 0.01))


def block(broken=""):
    """One attention with its two linears and a residual sum; `broken`: the inputs that are not int8."""
    d, name = Draft(np.float16), "layers.1.blocks.0"
    ones, at = [d.floats(word, np.ones(CHANNELS)) for word in "wb"], f"{name}.attn.matmul_{{}}_input_quantizer"
    shape = d.const("shape", np.array([0, 0, 3, HEADS, CHANNELS // HEADS]))
    x = d.add("LayerNormalization", ["x", *ones], f"{name}.norm1", axis=-1)
    x = linear(d, x, f"{name}.attn.qkv", 3 * CHANNELS)
    x = d.add("Transpose", [d.add("Reshape", [x, shape], "view")], "heads", perm=[2, 0, 3, 1, 4])
    parts = [f"{part}.part" for part in "qkv"]
    d.add("Split", [x], "split", parts, axis=0, num_outputs=3)
    axis = d.const("axis", np.array([0]))
    q, k, v = (d.add("Squeeze", [part, axis], part) for part in parts)
    kind = FLOAT8 if broken == "float8" else np.int8
    q, v = (t if broken == f"{n} float" else d.pair(t, at.format(n), kind) for n, t in (("q", q), ("v", v)))
    k = d.pair(k, at.format("k"), FLOAT8 if broken == "k float8" else kind)
    x = d.add("MatMul", [q, d.add("Transpose", [k], "k.t", perm=[0, 1, 3, 2])], f"{name}.attn.qk")
    x = d.add("Add", [x, d.floats("mask", np.ones((HEADS, TOKENS, TOKENS)))], "bias")
    x = d.pair(d.add("Softmax", [x], f"{name}.attn.softmax", axis=-1), at.format("a"), kind, scale=1 / 127)
    x = d.add("MatMul", [x, v], f"{name}.attn.av")
    x = d.add("Transpose", [x], "join", perm=[0, 2, 1, 3])
    x = d.add("Reshape", [x, d.const("flat", np.array([0, 0, CHANNELS]))], "flatten")
    return finished(d, d.add("Add", [linear(d, x, f"{name}.attn.proj", CHANNELS), "x"], f"{name}.add1"))


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
    (gemm,) = [gemm for gemm in inspect_model(block(broken)).gemms if gemm.format is None]
    assert gemm.inputs == inputs and gemm.kind == "matmul"


def test_float8_is_told_from_int8():
    model = block("float8")
    onnx.checker.check_model(model, full_check=True)
    report = inspect_model(model)
    assert [gemm.format for gemm in report.gemms] == ["int8", "float8", "float8", "int8"]
    assert report.asymmetric == [] and report.to_dict()["float8_gemms"] == 2


def test_integer_operators_and_casts_are_looked_through():
    d = Draft()
    x = d.add("Cast", [d.pair("x", "quantizer")], "to16", to=TensorProto.FLOAT16)
    weight = d.pair(d.const("weight", np.ones((CHANNELS, CHANNELS), np.float32)), "weight_pair")
    x = d.add("MatMul", [x, d.add("Cast", [weight], "half", to=TensorProto.FLOAT16)], "fc")
    levels = d.add(
        "QuantizeLinear", [d.add("Cast", [x], "wide", to=TensorProto.FLOAT), d.const("s", np.float32(1))], "q"
    )
    x = d.add("MatMulInteger", [levels, d.const("levels", np.ones((CHANNELS, 8), np.uint8))], "fc.int8")
    model = finished(d, d.add("Cast", [x], "out", to=TensorProto.FLOAT))
    assert [(gemm.name, gemm.format) for gemm in inspect_model(model).gemms] == [
        ("fc", "int8"), ("fc.int8", "int8")]  # fmt: skip


def test_hostile_graphs_end_in_one_error_or_a_report():
    d = Draft()
    d.add("MatMul", ["b.out", "b.out"], "a")
    cycle = finished(d, d.add("MatMul", ["a.out", "a.out"], "b"))
    assert [gemm.node for gemm in inspect_model(cycle).gemms] == ["a", "b"]
    d = Draft()
    x = d.add("DequantizeLinear", ["x"], "half")
    d.add("MatMul", [x, x], "none", [""])
    report = inspect_model(finished(d, d.add("MatMul", [x, x], "fc")))
    assert [gemm.inputs for gemm in report.gemms] == [("unknown", "unknown")] * 2
    with pytest.raises(SwinQuantError, match="the ONNX graph is empty"):
        inspect_model(onnx.ModelProto())
    d, x = Draft(), "x"
    for number in range(3000):
        x = d.add("Identity", [x], f"i{number}")
    assert len(inspect_model(finished(d, linear(d, x, "fc", 8))).gemms) == 1
