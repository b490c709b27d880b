"""swin-quant show of an ONNX file: the table, the JSON, and files that are not ONNX."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper


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
    assert report["gemms"][0]["name"] == "layers.0.blocks.1.mlp.fc1" and report["gemms"][0]["int8"]


def test_rules_of_npus_are_printed_with_their_sources_and_go_to_a_file(run, model, tmp_path):
    lines = run("show", model, "--for", "qnn", "--json", tmp_path / "report.json").ok().out.splitlines()
    assert lines[0].startswith("qnn (") and lines[0].endswith(": 1 nodes do not fit")
    assert lines[1] == "x (input): its shape is open: export with a fixed batch and size"
    assert all(line.startswith("source: ") for line in lines[2:4]) and "14052" in lines[3]
    found = json.loads((tmp_path / "report.json").read_text())["npu"]
    assert found["for"] == "qnn" and [one["node"] for one in found["misfits"]] == ["x"]
    assert "MatMul" in found["takes"] and found["lacks"] == ["Loop", "If", "Scan"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--for", "coreml"), "there are qnn, openvino-npu"), (("--engine", "qnn"), "runs no ONNX file")],
)
def test_unknown_targets_are_a_line(run, model, words, said):
    assert said in run("show", model, *words).error(2)


def test_files_that_are_no_onnx(run, tmp_path):
    bad = tmp_path / "bad.onnx"
    assert "no such file" in run("show", bad).error(1)
    bad.write_bytes(b"\xff\xfe not protobuf")
    assert f"{bad}: is not an ONNX file" in run("show", bad).error(1)
    bad.write_bytes(b"")
    assert str(bad) in run("show", bad).error(1)
