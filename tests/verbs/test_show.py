"""`show` of a model: every node with its state, bits, range and shape; and of an ONNX file, or of what is none."""

import json

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

FIELDS = ["node", "role", "state", "format", "bits", "granularity", "grid", "amax", "low", "high", "shape"]
# Nodes in 3 blocks and 1 patch merging, counted from docs/reference, sections 1.3 and 1.5.
TOTAL = 3 * 23 + 3


@pytest.fixture
def nodes(run, micro):
    """nodes("swin", flags ...) -> {node: row} from the JSON."""

    def go(kind, *flags):
        done = run("show", "--cfg", micro / f"{kind}.yaml", "--json", "-", *flags)
        assert done.code == 0 and done.err == "", done
        rows = json.loads(done.out)
        assert all(list(row) == FIELDS for row in rows)
        return {row["node"]: row for row in rows}

    return go


def test_a_calibrated_checkpoint_brings_the_policy_of_its_card(nodes, calibrated):
    rows = nodes("swin", "--checkpoint", calibrated)
    assert sum(row["state"] == "on" for row in rows.values()) == 3 * 16 + 3


def test_shapes_are_those_of_one_picture(nodes):
    """8 x 8 tokens of 16 channels in 4 windows of 16; then 4 x 4 tokens of 32 channels in one window, two heads."""
    shape = {name: row["shape"] for name, row in nodes("swin").items()}
    first, second, merging = "layers.0.blocks.1.", "layers.1.blocks.0.", "layers.0.downsample.reduction."
    assert shape[first + "layernorm_input1_quantizer"] == shape[first + "add2_local_input_quantizer"] == "1x64x16"
    assert shape[first + "attn.qkv._weight_quantizer"] == "48x16"
    assert shape[first + "attn.qkv._aftergemm_quantizer"] == "4x16x48"
    assert shape[first + "attn.softmax_input_quantizer"] == "4x1x16x16"
    assert shape[first + "mlp.fc2._input_quantizer"] == "1x64x64"
    assert shape[merging + "_input_quantizer"] == "1x16x64" and shape[merging + "_weight_quantizer"] == "32x64"
    assert shape[second + "attn.matmul_q_input_quantizer"] == "1x2x16x16"
    assert shape[second + "mlp.fc1._aftergemm_quantizer"] == "1x16x128"
    v2 = {name: row["shape"] for name, row in nodes("swinv2").items()}
    assert v2[second + "attn.mha_q_input_quantizer"] == "1x2x16x16"
    assert v2[merging + "_aftergemm_quantizer"] == "1x16x32"
    assert shape == {name: value for name, value in v2.items() if ".mha_" not in name}


def test_the_table_has_every_node_on_one_line_and_counts(run, nodes, micro):
    lines = run("show", "--cfg", micro / "swin.yaml", "--policy", "ft-mode1").out.splitlines()
    assert lines[0].split() == [name for name in FIELDS if name not in ("low", "high")]
    assert [line.split()[0] for line in lines[1 : TOTAL + 1]] == list(nodes("swin"))
    assert "51 of 72 nodes are on" in lines[-1]


def test_zero_points_show_both_ends(nodes, calibrated, tmp_path):
    rules = "- enable: role:gemm_input\n- nodes: '*.mlp.fc2._input_quantizer'\n  symmetric: false\n"
    (tmp_path / "mine.yaml").write_text(f"name: mine\nrules:\n{rules}")
    state = torch.load(calibrated, weights_only=True)
    for name, row in nodes("swin", "--checkpoint", calibrated, "--policy", tmp_path / "mine.yaml").items():
        if name.endswith("mlp.fc2._input_quantizer"):
            assert row["grid"] == "zero point" and [row["low"], row["high"]] == state[f"{name}._bounds"].tolist()
            assert -0.18 < row["low"] < 0 < row["high"]  # the output of GELU
        else:
            assert row["grid"] == "symmetric" and row["low"] is row["high"] is None


def test_a_policy_of_the_user_s(run, nodes, micro, tmp_path):
    path = tmp_path / "mine.yaml"
    rule = "  - enable: role:gemm_weight\n    granularity: per-channel\n    bits: 3\n"
    path.write_text(f"name: mine\nrules:\n{rule}  - disable: layers.1.*\n")
    on = {name: row for name, row in nodes("swin", "--policy", path).items() if row["state"] == "on"}
    assert len(on) == 2 * 4 + 1 and all(name.endswith("_weight_quantizer") for name in on)
    assert {(row["bits"], row["granularity"]) for row in on.values()} == {(3, "per-channel")}
    path.write_text("name: mine\nrules:\n  - enable: layers.9.*\n")
    words = ("show", "--cfg", micro / "swin.yaml", "--policy", path)
    line = run(*words).error(2)
    assert "policy mine: rule 1" in line and "layers.9.*" in line
    line = run(*words[:-1], "qdq", "ft-mode1").error(2)
    assert "--policy qdq ft-mode1: give one" in line


@pytest.fixture
def model(tmp_path):
    """One int8 linear of a block and one float linear outside, in float32."""
    constants = {
        "scale": np.float32(0.1),
        "zero": np.int8(0),
        "layers.0.blocks.1.mlp.fc1.weight": np.ones((4, 8), np.int8),
        "scales": np.ones(8, np.float32),
        "zeros": np.zeros(8, np.int8),
        "head.weight": np.ones((8, 3), np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="in"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], name="in.dq"),
        helper.make_node(
            "DequantizeLinear", ["layers.0.blocks.1.mlp.fc1.weight", "scales", "zeros"], ["w"], name="w.dq", axis=1
        ),
        helper.make_node("MatMul", ["d", "w"], ["h"], name="fc1"),
        helper.make_node("MatMul", ["h", "head.weight"], ["y"], name="head"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", 1, ["batch", 4])], [info("y", 1, ["batch", 3])],
                              [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()])  # fmt: skip
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    return file


def test_the_table_says_what_is_int8_and_what_stays_float(run, model):
    done = run("show", model).ok()
    lines = done.out.splitlines()
    assert lines[0] == "opset 20, float32 body; 1 of 2 products int8; 1 QuantizeLinear, 2 DequantizeLinear"
    assert lines[-2:] == ["float products: head", "float ops: none"]


def test_operators_that_stand_for_plain_nodes_are_named(run, model):
    made, opsets = onnx.load(model), [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    made.functions.append(helper.make_function("mine", "Head", ["a", "b"], ["c"], body, opsets[:1]))
    made.graph.node[-1].op_type, made.graph.node[-1].domain = "Head", "mine"
    made.opset_import.append(opsets[1])
    onnx.save(made, model)
    done = run("show", model, "--engine", "openvino")
    assert done.code == 0 and "1 of 2 products int8" in done.out
    assert "operators: Head 1: reported as their plain nodes" in done.err


def test_the_report_goes_to_a_file(run, model, tmp_path):
    done = run("show", model, "--json", tmp_path / "report.json", "--quiet")
    assert done.code == 0 and done.err == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["file"], report["int8_gemms"], len(report["gemms"])) == ("model.onnx", 1, 2)
    assert report["gemms"][0]["name"] == "layers.0.blocks.1.mlp.fc1" and report["gemms"][0]["format"] == "int8"


def test_rules_of_npus_are_printed_with_their_sources_and_go_to_a_file(run, model, tmp_path):
    lines = run("show", model, "--for", "qnn", "--json", tmp_path / "report.json").ok().out.splitlines()
    assert lines[0].startswith("qnn (") and lines[0].endswith(": 1 nodes do not fit")
    assert lines[1] == "x (input): its shape is open: export with a fixed batch and size"
    assert all(line.startswith("source: ") for line in lines[2:4]) and "14052" in lines[3]
    found = json.loads((tmp_path / "report.json").read_text())["npu"]
    assert found["for"] == "qnn" and found["misfits"] == lines[1:2]
    assert "MatMul" in found["takes"] and found["lacks"] == ["Loop", "If", "Scan"]


def test_unknown_targets_are_a_line(run, model):
    for words, said in (
        (("--for", "coreml"), "there are qnn, openvino-npu"),
        (("--engine", "qnn"), "runs no ONNX file"),
    ):
        assert said in run("show", model, *words).error(2)


def test_files_that_are_no_onnx(run, tmp_path):
    for flag, value in (("--for", "qnn"), ("--engine", "onnxruntime")):
        assert f"{flag}: is for ONNX files" in run("show", "policies", flag, value).error(2)
    bad = tmp_path / "bad.onnx"
    assert "no such file" in run("show", bad).error(1)
    bad.write_bytes(b"\xff\xfe not protobuf")
    assert f"{bad}: is not an ONNX file" in run("show", bad).error(1)
    bad.write_bytes(b"")
    assert str(bad) in run("show", bad).error(1)
