"""`inspect` on attention built by hand and broken one condition at a time, on exports, and on foreign files."""

import json
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx_reader.inspect import inspect_model
from swin_quant.base.compat import import_timm
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
    """One attention with its two linears and a residual sum; `broken` names the difference from the fused shape."""
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
    if "late scale" in broken:
        x = d.add("Mul", [x, d.const("scale", np.asarray(0.2, body))], "late")
    if "reshape" in broken:
        same = d.const("same", np.array([0, 0, tokens, tokens], np.int64))
        x = d.add("Reshape", [x, same], "again")
    mask = d.const("mask", np.ones((heads, tokens, tokens), body))
    if "computed mask" in broken:
        mask = d.add("Relu", [x], "computed")
    x = d.add("Add", [x, mask], "bias")
    if "two masks" in broken:
        x = d.add("Add", [x, mask], "mask")
    x = d.add("Softmax", [x], f"{name}.attn.softmax", axis=-1)
    if "softmax float" not in broken:
        x = d.pair(x, f"{name}.attn.matmul_a_input_quantizer", kind, scale=1 / 127, zero=zero)
    x = d.add("MatMul", [x, v], f"{name}.attn.av")
    x = d.add("Transpose", [x], "join", perm=[0, 2, 1, 3])
    x = d.add("Reshape", [x, d.const("flat", np.array([0, 0, channels], np.int64))], "flatten")
    if "gathered" in broken:
        x = d.add("Gather", [x, d.const("places", np.arange(tokens))], "reorder", axis=1)
    x = d.linear(x, f"{name}.attn.proj", channels, channels, quantized="proj float" not in broken)
    residual = "x"
    if "residual" in broken:
        x, residual = d.pair(x, f"{name}.add1_local"), d.pair(residual, f"{name}.add1_residual")
    return d.model(d.add("Add", [x, residual], f"{name}.add1"))


def findings(model, *backends):
    report = inspect_model(model, backends or ("tensorrt", "onnxruntime", "openvino"))
    return {(finding.backend, finding.rule) for finding in report.findings}


def test_the_fused_shape_is_recognised():
    model = block()
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((2, TOKENS, CHANNELS), np.float16)})[0].shape == (2, TOKENS, CHANNELS)
    report = inspect_model(model)
    (verdict,) = report.verdicts
    assert verdict.pattern == "fusible int8" and verdict.fusible and verdict.failed == {}
    assert (verdict.attention.name, verdict.attention.head_size, verdict.attention.tokens) == (
        "layers.1.blocks.0.attn", 32, TOKENS)  # fmt: skip
    assert report.body == "float16" and report.opset == 20 and report.pairs == (6, 8) and report.unrecognised == []
    assert [(gemm.name, gemm.kind, gemm.int8, gemm.weight, gemm.output_int8) for gemm in report.gemms] == [
        ("layers.1.blocks.0.attn.qkv", "linear", True, "per-channel", True),
        ("layers.1.blocks.0.attn.qk", "matmul", True, None, False),
        ("layers.1.blocks.0.attn.av", "matmul", True, None, True),
        ("layers.1.blocks.0.attn.proj", "linear", True, "per-channel", False),
    ]
    assert list(report.blocks) == ["layers.1.blocks.0"]
    assert report.float_ops == {"Add": 2, "LayerNormalization": 1, "Softmax": 1}
    assert report.layout_ops == {"Transpose": 3, "Reshape": 2, "Split": 1, "Squeeze": 3}
    assert findings(model, "tensorrt") == set()


@pytest.mark.parametrize("broken, condition, said, pattern", [
    ("late scale", "scale before Q K^T", "scaled after Q K^T (late): fold the scale into q", "int8 matmuls"),
    ("two masks", "one constant mask", "bias and mask are 2 additions", "int8 matmuls"),
    ("computed mask", "one constant mask", "bias adds a value computed from the picture", "int8 matmuls"),
    ("reshape", "no other op", "Reshape again stands between", "int8 matmuls"),
    ("q float", "q quantized", "q is float16: no Q/DQ in front of layers.1.blocks.0.attn.qk", "separate ops"),
    ("v float", "v quantized", "v is float16: no Q/DQ in front of layers.1.blocks.0.attn.av", "separate ops"),
    ("k float8", "one format", "its products are of float8 and int8", "separate ops"),
    ("softmax float", "softmax quantized", "the softmax is float16", "separate ops"),
    ("gathered", "result quantized", "the result of layers.1.blocks.0.attn.av is not quantized", "int8 matmuls"),
    ("proj float", "result quantized", "the result of layers.1.blocks.0.attn.av is not quantized", "int8 matmuls"),
])  # fmt: skip
def test_one_broken_condition_is_named(broken, condition, said, pattern):
    model = block([broken])
    (verdict,) = inspect_model(model).verdicts
    assert list(verdict.failed) == [condition] and said in verdict.failed[condition]
    assert verdict.pattern == pattern and not verdict.fusible
    assert ("tensorrt", "attention not fused") in findings(model)


@pytest.mark.parametrize("size", [8, 16, 24, 32, 64, 264])
def test_only_reported_head_sizes_count_as_fusible(size):
    (verdict,) = inspect_model(block(channels=2 * size)).verdicts
    assert verdict.attention.head_size == size and verdict.fusible == (size in (16, 32, 64))
    assert verdict.pattern == ("fusible int8" if verdict.fusible else "int8 matmuls")
    assert ("sizes" in verdict.failed) == (not verdict.fusible) and ("head size" in verdict.failed) == (
        size in (8, 264)
    )


@pytest.mark.parametrize("size", [8, 24, 32, 64, 256, 264])
def test_float8_has_the_head_sizes_of_float(size):
    model = block(["float8"], channels=2 * size)
    onnx.checker.check_model(model, full_check=True)
    report = inspect_model(model)
    (verdict,) = report.verdicts
    assert verdict.pattern == ("float8 matmuls" if size in (8, 264) else "fusible float8")
    assert [gemm.format for gemm in report.gemms] == ["int8", "float8", "float8", "int8"]
    assert ("tensorrt", "not symmetric int8") not in findings(model)
    assert {("openvino", "float8"), ("onnxruntime", "float8")} <= findings(model)


@pytest.mark.parametrize("tokens", [512, 576])
def test_int8_of_more_than_512_tokens_a_window_is_not_fused_and_float8_is(tokens):
    """A window of 24 x 24 has 576."""
    (verdict,) = inspect_model(block(tokens=tokens)).verdicts
    assert verdict.attention.tokens == tokens and verdict.fusible == (tokens == 512)
    if tokens == 576:
        assert verdict.failed == {"sizes": "576 tokens a window: int8 fusion is reported up to 512"}
        assert ("tensorrt", "attention not fused") in findings(block(tokens=tokens))
    (verdict,) = inspect_model(block(["float8"], tokens=tokens)).verdicts
    assert verdict.pattern == "fusible float8"


@pytest.mark.parametrize("size, pattern", [(24, "fusible float"), (32, "fusible float"), (264, "separate ops")])
def test_attention_without_any_quantizer_is_fusible_in_float(size, pattern):
    broken = ["q float", "v float", "softmax float", "proj float"]
    model = block(broken, channels=2 * size)
    (pair,) = [node for node in model.graph.node if node.name.endswith("matmul_k_input_quantizer.dq")]
    (user,) = [node for node in model.graph.node if pair.output[0] in node.input]
    user.input[0] = "k.part.out"
    (verdict,) = inspect_model(model).verdicts
    assert verdict.pattern == pattern and verdict.fusible == (size != 264)


@pytest.mark.parametrize(("first", "parts"), [("x", []), ("half", ["gelu.erf"])])
def test_a_gelu_is_one_operator_if_1_and_erf_are_multiplied_with_x_first(first, parts):
    """Checked on ONNX Runtime's own graph, which has one operator for it or not."""
    draft = Draft(np.float32)
    two, one, half = (draft.const(name, np.float32(value)) for name, value in (("r", 2**0.5), ("1", 1), ("h", 0.5)))
    both = draft.add("Add", [draft.add("Erf", [draft.add("Div", ["x", two], "gelu.div")], "gelu.erf"), one], "gelu.add")
    if first == "x":
        out = draft.add("Mul", [draft.add("Mul", ["x", both], "gelu.mul"), half], "gelu.half")
    else:
        out = draft.add("Mul", ["x", draft.add("Mul", [both, half], "gelu.half")], "gelu.mul")
    model = draft.model(out, opset=17)
    found = [finding.nodes for finding in inspect_model(model, ["onnxruntime"]).findings if "GELU" in finding.rule]
    assert found == ([parts] if parts else [])
    assert ("Erf" in operators_run(model)) == bool(parts)


def operators_run(model):
    """The operators of ONNX Runtime's optimized graph."""
    options = onnxruntime.SessionOptions()
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "run.onnx"))
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return {node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node}


def test_mixed_inputs_run_in_float_and_are_named():
    report = inspect_model(block(["q float"]), ["tensorrt"])
    (finding,) = [finding for finding in report.findings if finding.rule == "one int8 input"]
    assert finding.nodes == ["layers.1.blocks.0.attn.qk"]
    assert [gemm.inputs for gemm in report.gemms if not gemm.int8] == [("float16", "int8")]


@pytest.mark.parametrize("broken, backend, rule", [
    ("residual", "tensorrt", "residual add in int8"),
    ("residual", "tensorrt", "lone output pair"),
    ("asymmetric", "tensorrt", "not symmetric int8"),
    ("asymmetric", "openvino", "asymmetric matmul"),
    ("two masks", "openvino", "attention not fused"),
    ("", "openvino", "float16 body"),
])  # fmt: skip
def test_rules_of_engines(broken, backend, rule):
    assert (backend, rule) in findings(block([broken]))
    assert broken == "" or (backend, rule) not in findings(block())


def test_a_float32_body_is_said_for_tensorrt_alone():
    assert findings(block(body=np.float32)) == {("tensorrt", "float32 body")}


@pytest.mark.parametrize("axis, wrong", [(1, False), (0, True)])
def test_a_weight_scaled_along_its_inputs_is_named(axis, wrong):
    d = Draft()
    model = d.model(d.linear("x", "layers.0.blocks.0.mlp.fc1", CHANNELS, 2 * CHANNELS, axis=axis))
    assert (("tensorrt", "weight axis") in findings(model)) == wrong


def test_scales_of_activations_must_be_one_constant():
    d = Draft()
    model = d.model(d.pair("x", "per_channel", scale=np.full(TOKENS, 0.1)))
    assert findings(model, "tensorrt") == {("tensorrt", "per-channel activation")}
    d = Draft()
    zero = d.const("zero", np.zeros((), np.int8))
    scale = d.add("ReduceMax", ["x"], "amax", keepdims=0)
    levels = d.add("QuantizeLinear", ["x", scale, zero], "q")
    model = d.model(d.add("DequantizeLinear", [levels, scale, zero], "dq"))
    assert ("onnxruntime", "computed scale") in findings(model)


@pytest.mark.parametrize("opset, expected", [
    (20, set()), (21, {("onnxruntime", "opset")}), (26, {("onnxruntime", "opset"), ("tensorrt", "opset")}),
])  # fmt: skip
def test_opsets(opset, expected):
    model = block(body=np.float32)
    model.opset_import[0].version = opset
    assert {finding for finding in findings(model) if finding[1] == "opset"} == expected


def test_a_cast_behind_a_dequantize_is_said():
    d = Draft(np.float32)
    x = d.pair("x", "quantizer")
    x = d.add("Cast", [x], "to16", to=TensorProto.FLOAT16)
    x = d.add("MatMul", [x, d.const("weight", np.ones((CHANNELS, CHANNELS), np.float16))], "fc")
    assert ("tensorrt", "cast after dequantize") in findings(d.model(x))


def test_the_report_is_json():
    record = inspect_model(block(["two masks"])).to_dict()
    assert json.loads(json.dumps(record)) == record
    assert record["int8_gemms"] == 4 and record["attention"][0]["conditions"]["q quantized"] is True
    assert record["attention"][0]["conditions"]["one constant mask"] is False


@pytest.fixture(scope="module")
def timm_swin(tmp_path_factory):
    """A small Swin of timm's, exported as its users would."""
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.models.SwinTransformer(img_size=32, patch_size=4, embed_dim=32, depths=(2,), num_heads=(2,),
                                        window_size=4, num_classes=5).eval()  # fmt: skip
    file = tmp_path_factory.mktemp("timm") / "swin.onnx"
    torch.onnx.export(model, (torch.zeros(2, 3, 32, 32),), file, dynamo=True, external_data=False, verbose=False,
                      dynamic_shapes=({0: torch.export.Dim("batch")},))  # fmt: skip
    return onnx.load(file)


@pytest.mark.slow
def test_a_foreign_swin_is_read_by_the_scopes_that_torch_recorded(timm_swin):
    report = inspect_model(timm_swin)
    assert list(report.blocks) == ["(outside blocks)", "layers.0.blocks.0", "layers.0.blocks.1"]
    assert [len(gemms) for gemms in report.blocks.values()] == [2, 6, 6] and not any(g.int8 for g in report.gemms)
    names = [gemm.name for gemm in report.blocks["layers.0.blocks.1"] if gemm.kind == "linear"]
    assert [name.rsplit(".", 1)[0] for name in names] == [
        f"layers.0.blocks.1.{part}" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]  # fmt: skip
    plain, shifted = report.verdicts
    assert plain.pattern == "fusible float" and "2 additions" in shifted.failed["one constant mask"]
    assert ("openvino", "attention not fused") in findings(timm_swin)


@pytest.mark.slow
def test_a_graph_without_names_is_told_apart_and_says_so(timm_swin):
    stripped = onnx.ModelProto()
    stripped.CopyFrom(timm_swin)
    rename = {tensor.name: f"t{number}" for number, tensor in enumerate(stripped.graph.initializer)}
    for tensor in stripped.graph.initializer:
        tensor.name = rename[tensor.name]
    for node in stripped.graph.node:
        node.name = ""
        del node.metadata_props[:]
        for number, name in enumerate(node.input):
            node.input[number] = rename.get(name, name)
    report = inspect_model(stripped)
    assert len(report.gemms) == 14 and [v.attention.name for v in report.verdicts] == ["attention 0", "attention 1"]
    assert any("no node name says layers.N.blocks.M" in said for said in report.unrecognised)


def test_what_is_no_swin_is_said_and_not_guessed():
    d = Draft(np.float32)
    x = d.add("Softmax", ["x"], "lonely")
    x = d.add("FusedGelu", [x], "gelu", domain="com.microsoft")
    model = d.model(x)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    said = " ".join(inspect_model(model).unrecognised)
    assert "1 softmax without a matmul on both sides (lonely)" in said
    assert "no attention" in said and "com.microsoft.FusedGelu" in said


def test_a_report_takes_time_in_proportion_to_the_graph():
    """3,000 products of one constant chain of 1,000 moves: each search looks back a little, not to the beginning."""
    d = Draft(np.float32)
    name = d.const("w", np.zeros((CHANNELS, CHANNELS), np.float32))
    for number in range(1000):
        name = d.add("Transpose", [name], f"t{number}", perm=[1, 0])
    x = "x"
    for number in range(3000):
        x = d.add("MatMul", [x, name], f"layers.0.blocks.{number}.attn.proj")
    model = d.model(x)
    started = time.process_time()
    assert len(inspect_model(model, ["tensorrt"]).gemms) == 3000
    assert time.process_time() - started < 3


def test_hostile_graphs_end_in_one_error_or_a_report():
    d = Draft(np.float32)
    d.add("Relu", ["b.out"], "a")
    cycle = d.model(d.add("Relu", ["a.out"], "b"))
    with pytest.raises(SwinQuantError, match="node a uses 'b.out' before anything makes it"):
        inspect_model(cycle)
    d = Draft(np.float32)
    d.add("Relu", ["x"], "a", ["same"])
    loop = d.model(d.add("Identity", ["same"], "b", ["same"]))
    with pytest.raises(SwinQuantError, match="node b makes 'same' a second time"):
        inspect_model(loop)
    d = Draft(np.float32)
    with pytest.raises(SwinQuantError, match="node half lacks inputs or outputs of a QuantizeLinear"):
        inspect_model(d.model(d.add("QuantizeLinear", ["x"], "half")))
    with pytest.raises(SwinQuantError, match="the ONNX graph is empty"):
        inspect_model(onnx.ModelProto())
    d, x = Draft(np.float32), "x"
    for number in range(3000):
        x = d.add("Identity", [x], f"i{number}")
    assert len(inspect_model(d.model(d.linear(x, "fc", CHANNELS, 8))).gemms) == 1
