"""Graphs that crash ONNX's library end only a worker process; so do protobuf bombs."""

import os
import resource
import time

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

from swin_quant.backends.onnx_reader.file import open_onnx, read_model
from swin_quant.backends.onnx_reader.products import inspect_model
from swin_quant.backends.onnx_reader.worker import ask
from swin_quant.base.errors import SwinQuantError


@pytest.fixture
def model(small_net):
    return small_net().proto()


@pytest.fixture
def refusal(tmp_path):
    """The line in which `opened` refuses a model, or bytes; it takes neither seconds nor gigabytes."""

    def refuse(content, opened=open_onnx):
        path = tmp_path / "x.onnx"
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(SwinQuantError) as caught:
            opened(path)
        assert time.process_time() - started < 3
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 400
        return message.removeprefix(f"{path}: ")

    return refuse


def split(model: ModelProto, outputs: int) -> ModelProto:
    """The model with a Split whose `num_outputs` differs from its two outputs."""
    node = helper.make_node("Split", ["images"], ["one", "two"], name="lies", num_outputs=outputs, axis=1)
    model.graph.node.insert(0, node)
    return model


@pytest.mark.parametrize("outputs", [1, 10**9])
def test_a_graph_that_ends_the_library_is_refused_in_one_line(model, refusal, outputs):
    said = refusal(split(model, outputs))
    assert said.startswith("its graph makes no sense: ")
    if outputs == 1:
        assert "does not survive it (signal SIGABRT)" in said


@pytest.mark.nightly
def test_a_large_file_is_read_behind_a_small_one(model, write_onnx):
    """The limit on memory grows with the file, before the file reaches the worker."""
    assert open_onnx(write_onnx(model)).sizes == (8, 8)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(800 << 18, np.float32), "large"))
    assert open_onnx(write_onnx(model)).sizes == (8, 8)


def test_a_graph_that_ends_the_library_can_be_inspected(model, write_onnx):
    report = inspect_model(read_model(write_onnx(split(model, 1))))
    assert report.opset == 20 and report.gemms


def test_a_forked_process_has_a_worker_of_its_own(model):
    request = model.SerializeToString()
    answers = {ask(request)}
    reading, writing = os.pipe()
    if not (child := os.fork()):
        good = ask(request) in answers
        os.write(writing, b"good" if good else b"bad")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"good"
    assert ask(request) in answers


CIRCLE = """<ir_version: 10, opset_import: ["" : 20, "d" : 1]> g (float[1] x) => (float[1] y) { y = d.F(x) }
<domain: "d", opset_import: ["" : 20, "d" : 1]> F (x) => (y) { y = d.G(x) }
<domain: "d", opset_import: ["" : 20, "d" : 1]> G (x) => (y) { y = d.F(x) }"""


def test_functions_in_a_circle_are_refused(refusal, write_onnx):
    assert refusal(parser.parse_model(CIRCLE)).startswith("its graph makes no sense: Cycle detected")
    with pytest.raises(SwinQuantError, match="its graph makes no sense: Cycle detected"):
        inspect_model(read_model(write_onnx(parser.parse_model(CIRCLE))))


def test_a_tensor_inside_a_function_is_looked_at_too(refusal):
    model = parser.parse_model(CIRCLE)
    tensor = numpy_helper.from_array(np.zeros(4, np.float32))
    tensor.dims[:] = [2**40]
    model.functions[0].node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    assert "declares 1099511627776, and does not hold that" in refusal(model, read_model)


@pytest.mark.parametrize("where", ["name of a node", "key of metadata", "location of data"])
def test_text_that_is_not_utf8_is_refused(model, refusal, where):
    if where == "name of a node":
        model.graph.node[0].name = "mark"
    elif where == "key of metadata":
        model.metadata_props.add(key="mark", value="x")
    else:
        model.graph.initializer[0].external_data.add(key="mark", value="x")
    content = model.SerializeToString().replace(b"mark", b"ma\xff\xfe")
    assert refusal(content, read_model) == "is not an ONNX file: a text in it is not UTF-8"


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of protobuf, as bytes."""
    size = len(content)
    length = bytes([size >> shift & 0x7F | 0x80 for shift in (0, 7, 14)]) + bytes([size >> 21])
    return bytes([number << 3 | 2]) + length + content


def test_millions_of_empty_nodes_are_refused_before_they_take_their_memory(refusal):
    assert "holds more than 600,000 fields" in refusal(field(7, b"\x0a\x00" * 600_001))


def test_functions_that_grow_when_they_are_inlined_are_refused(model, refusal):
    """Each of six functions calls the one before it ten times."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
    for number in range(6):
        kind = {"op_type": f"F{number - 1}", "domain": "d"} if number else {"op_type": "Relu"}
        body = [helper.make_node(inputs=[f"t{i}"], outputs=[f"t{i + 1}"], **kind) for i in range(10)]
        model.functions.append(helper.make_function("d", f"F{number}", ["t0"], ["t10"], body, opsets))
    model.opset_import.append(opsets[1])
    model.graph.node.append(helper.make_node("F5", ["images"], ["unused"], domain="d"))
    assert "its graph makes no sense: " in refusal(model)


def test_small_numbers_that_grow_are_refused(refusal):
    """Integers of a byte each, which take eight in memory."""
    assert refusal(field(7, field(5, field(7, bytes(150 << 20))))).startswith("is not an ONNX file: ")
