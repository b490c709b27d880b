"""ONNX files as `analyze` counts them: products by hand, shapes by inference."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from swin_quant.backends.onnx_reader.products import counted  # noqa: E402
from swin_quant.base.errors import SwinQuantError  # noqa: E402
from swin_quant.verbs.analyze import analyze_onnx  # noqa: E402


def file_of(tmp_path, nodes, tensors, output, batch="batch", name="net.onnx", kind=TensorProto.FLOAT, side=8):
    images = helper.make_tensor_value_info("images", kind, [batch, 3, side, side])
    given = helper.make_tensor_value_info(output, kind, None)
    held = [numpy_helper.from_array(value, key) for key, value in tensors.items()]
    graph = helper.make_graph(nodes, "net", [images], [given], held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.save(model, tmp_path / name)
    return tmp_path / name


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs, [output], name=output, **attributes)


@pytest.fixture
def network(tmp_path):
    """A strided convolution, pooled, and a linear with a transposed weight."""
    values = np.random.default_rng(0).normal(size=(16, 3, 3, 3)).astype(np.float32)
    nodes = [
        node("Conv", ["images", "kernel"], "maps", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["maps"], "positive"),
        node("GlobalAveragePool", ["positive"], "pooled"),
        node("Flatten", ["pooled"], "flat"),
        node("Gemm", ["flat", "weight"], "logits", transB=1),
    ]
    tensors = {"kernel": values, "weight": np.full((10, 16), 7e4, np.float32)}
    return file_of(tmp_path, nodes, tensors, "logits")


def test_counts_are_those_of_hand(network):
    found = counted(network, 2)
    by_name = {call.name: call for call in found.calls}
    assert by_name["Conv"].macs == 2 * 16 * 4 * 4 * 3 * 9 and by_name["Gemm"].macs == 2 * 10 * 16
    assert by_name["Conv"].outputs == ((2, 16, 4, 4),) and by_name["Relu"].inputs == ((2, 16, 4, 4),)
    assert found.parameters == 16 * 27 + 160 and found.open_batch


def test_what_is_inside_of_a_branch_is_counted(tmp_path):
    weight = numpy_helper.from_array(np.full((192, 10), 7e4, np.float32), "hidden")
    product = node("MatMul", ["flat", "hidden"], "product")
    zeros = node("Mul", ["product", "product"], "squares")
    output = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("product", "squares")]
    then = helper.make_graph([product], "then", [], output[:1], [weight])
    other = helper.make_graph([product, zeros], "other", [], output[1:], [weight])
    nodes = [node("Flatten", ["images"], "flat"), node("If", ["yes"], "logits", then_branch=then, else_branch=other)]
    found = analyze_onnx(file_of(tmp_path, nodes, {"yes": np.array(True)}, "logits"))
    assert [call.macs for call in found.calls if call.name == "MatMul"] == [1920, 1920]
    assert found.depending == ("If (logits)",)


def test_what_depends_on_data_is_named(tmp_path):
    where = file_of(tmp_path, [node("NonZero", ["images"], "there")], {}, "there", kind=TensorProto.FLOAT)
    model = onnx.load(where)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, where)
    assert analyze_onnx(where).depending == ("NonZero (there)",)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda model: model.graph.node[0].CopyFrom(node("Mine", ["images"], "maps", domain="else")),
            "not an operator",
        ),
        (lambda model: model.graph.input[0].type.tensor_type.shape.dim[2].ClearField("dim_value"), "any size"),
        (lambda model: model.graph.input.add().CopyFrom(model.graph.input[0]), "2 inputs"),
        (lambda model: model.graph.initializer[0].dims.__setitem__(0, 99), "not what it holds"),
    ],
)
def test_files_that_cannot_be_counted_are_refused_in_a_line(network, change, fault):
    model = onnx.load(network)
    change(model)
    onnx.save(model, network)
    with pytest.raises(SwinQuantError, match=fault) as refused:
        counted(network, 1)
    assert str(network) in str(refused.value)
