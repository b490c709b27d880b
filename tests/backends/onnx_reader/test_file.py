"""ONNX files from strangers: good ones are read, others refused in one line that names the place."""

import os
import re

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx_reader.checks import first_line
from swin_quant.backends.onnx_reader.file import as_input, as_output, open_onnx, verified
from swin_quant.base.errors import SwinQuantError, UsageError


@pytest.fixture
def net(small_net):
    return small_net()


@pytest.fixture
def model(net):
    return net.proto()


def refusal(path):
    """The message of a refusal: one line that begins with the file."""
    with pytest.raises(SwinQuantError) as caught:
        open_onnx(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and text.count(str(path)) == 1
    return text


def tensor(model, name):
    return next(one for one in model.graph.initializer if one.name == name)


def node(model, name):
    return next(one for one in model.graph.node if one.name == name)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("batch, expected", [("batch", None), (4, 4)])
def test_a_good_file_says_what_it_is(small_net, write_onnx, opset, batch, expected):
    model = small_net(opset=opset, batch=batch).proto()
    model.metadata_props.add(key="made by", value="us")
    file = open_onnx(write_onnx(model))
    assert (file.input, file.outputs, file.dtype, file.batch) == ("images", ("logits",), "float32", expected)
    assert (file.channels, file.sizes, file.opset, file.quantizers) == (3, (8, 8), opset, 4)
    assert file.metadata == {"made by": "us"} and file.parts == ()
    assert open_onnx(write_onnx(small_net(dtype=np.float16).proto())).dtype == "float16"


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x00" * 100, b"{}"])
def test_what_is_no_onnx_file_is_refused(write_onnx, content):
    assert "is not an ONNX file" in refusal(write_onnx(content))


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "huge.onnx"
    with open(path, "wb") as file:
        file.truncate(2**31)  # sparse: it takes no room
    assert "is larger than the 2047 MB" in refusal(path)


def info(name, kind=TensorProto.FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def another_scale(model, name):
    node(model, "q").input[1] = name


def a_bomb(model):
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**20, 2**20]), "bomb"))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["bomb"], ["boom"]))


def an_evil_operator(model):
    model.opset_import.add(domain="evil", version=1)
    node(model, "attn.qk").domain = "evil"


QUANTIZER = "node q (QuantizeLinear)"
REFUSED = [
    (lambda model: setattr(model.opset_import[0], "version", 16), "is of opset 16: must be 17 to 21"),
    (lambda model: setattr(model.opset_import[0], "version", 22), "is of opset 22: must be 17 to 21"),
    (lambda model: setattr(model, "ir_version", onnx.IR_VERSION + 1), f"file format (IR) {onnx.IR_VERSION + 1}, newer"),
    (an_evil_operator, "node attn.qk is evil.MatMul"),
    (lambda model: tensor(model, "fc1.bias").dims.__setitem__(0, -16), "tensor fc1.bias has a negative size"),
    (lambda model: setattr(tensor(model, "fc1.bias"), "data_type", 77), "tensor fc1.bias is of no known type"),
    (
        lambda model: tensor(model, "fc1.bias").dims.extend([1] * 69),
        "tensor fc1.bias has a negative size, or more than 32 dimensions",
    ),
    (a_bomb, "tensor boom would have 1.1e+12 elements"),
    (lambda model: node(model, "attn.qk").input.__setitem__(1, "head.weight"), "its graph makes no sense"),
    (lambda model: another_scale(model, "nowhere"), f"{QUANTIZER}: its scale 'nowhere' is missing"),
    (lambda model: another_scale(model, "images"), f"{QUANTIZER}: its scale 'images' is missing, or computed"),
    *(
        (
            lambda model, scale=scale: tensor(model, "q.scale").CopyFrom(numpy_helper.from_array(scale, "q.scale")),
            f"{QUANTIZER}: its scale 'q.scale' must be finite",
        )
        for scale in np.array([0.0, -1.0, np.nan, np.inf], np.float32)
    ),
    *(  # a second input
        (lambda model, more=more: model.graph.input.append(info(*more)), says)
        for more, says in (
            (("more", TensorProto.FLOAT, [7, 2]), "its inputs are for batches of several sizes"),
            (
                ("more", TensorProto.DOUBLE, ["batch", 2]),
                "its input more is [?, 2]: one of several must be [batch, ...]",
            ),
            (("more", TensorProto.INT64, ["batch", "length"]), "its input more is [?, ?]: one of several must be"),
            (("more", TensorProto.INT64, []), "its input more is []: one of several must be"),
            (("no name", TensorProto.INT64, ["batch"]), "is [?]: one of several must be"),
        )
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_no_engine_should_get_is_refused_by_its_place(model, write_onnx, change, said):
    change(model)
    assert said in refusal(write_onnx(model))


def test_an_engine_that_is_older_than_a_file_says_so_without_a_place_in_its_sources(model, write_onnx):
    model.ir_version = 99
    with pytest.raises(Exception, match="Unsupported") as caught:
        pytest.importorskip("onnxruntime").InferenceSession(str(write_onnx(model)))
    assert re.fullmatch(r"Unsupported model IR version: 99, max supported IR version: \d+", first_line(caught.value))


@pytest.mark.parametrize("where", ["raw", "typed"])
def test_a_tensor_larger_than_its_data_is_refused(model, write_onnx, where):
    weight = tensor(model, "fc1.bias")
    if where == "typed":
        values = numpy_helper.to_array(weight).tolist()
        weight.ClearField("raw_data")
        weight.float_data.extend(values)
        assert open_onnx(write_onnx(model)).opset == 20
    weight.dims[:] = [2**40, 2**20]
    assert "tensor fc1.bias declares 1099511627776, 1048576, and does not hold that" in refusal(write_onnx(model))


def external(model, name, **place):
    """Move a tensor's data to another file, by name only."""
    one = tensor(model, name)
    data = one.raw_data
    one.ClearField("raw_data")
    one.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        one.external_data.add(key=key, value=str(value))
    return data


@pytest.mark.parametrize("location", ["/etc/passwd", "../x.data", "sub/x.data", "link.data", "", ".", "a\0b", "..\\x"])
def test_external_data_elsewhere_is_refused(model, write_onnx, tmp_path, location):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "x.data", folder / "sub" / "x.data"):
        place.write_bytes(bytes(64))
    os.symlink(tmp_path / "x.data", folder / "link.data")
    external(model, "fc1.bias", location=location, length=64)
    assert "external data must be a file of the same folder" in refusal(write_onnx(model, "folder/x.onnx"))


@pytest.mark.parametrize(
    "place, said",
    [
        ({"length": 64, "offset": 1}, ""),
        ({"length": 32}, ""),
        ({"length": "x"}, ""),
        ({"offset": -64}, ""),
        ({"location": "gone.data"}, " is in 'gone.data', which is missing, or a hard link"),
    ],
)
def test_external_data_must_hold_the_tensor(model, write_onnx, tmp_path, place, said):
    external(model, "fc1.bias", **{"location": "x.data"} | place)
    (tmp_path / "x.data").write_bytes(bytes(64))
    assert f"tensor fc1.bias{said}" in refusal(write_onnx(model))


def buried(model, depth, scale, inside=()):
    """Quantize the logits inside nested branches; `inside`: tensors of the innermost."""

    def body(depth, x, out):
        """Nodes that make `out` of `x`, and the tensors they need."""
        if not depth:
            pair = [helper.make_node("QuantizeLinear", [x, scale], [f"{out}.q"], name="hidden.Q"),
                    helper.make_node("DequantizeLinear", [f"{out}.q", scale], [out], name="hidden.DQ")]  # fmt: skip
            return pair, list(inside)
        parts = [(f"{out}.b{n}", *body(depth - 1, x, f"{out}.b{n}")) for n in (0, 1)]
        branches = [helper.make_graph(nodes, name, [], [info(name)], held) for name, nodes, held in parts]
        made = helper.make_node("If", ["yes"], [out], then_branch=branches[0], else_branch=branches[1])
        return [made], [numpy_helper.from_array(np.array(True), "yes")]

    node(model, "head").output[0] = "raw"
    nodes, held = body(depth, "raw", "logits")
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(held)
    return model


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("value, fits", [(0.25, True), (-1.0, False)])
@pytest.mark.parametrize("outside", [True, False], ids=["outer", "inner"])
def test_scales_inside_of_other_nodes_are_looked_at_too(net, write_onnx, depth, value, fits, outside):
    scale = numpy_helper.from_array(np.float32(value), "hidden.scale")
    model = buried(net.proto(), depth, "hidden.scale", [] if outside else [scale])
    model.graph.initializer.extend([scale] if outside else [])
    if fits:
        assert open_onnx(write_onnx(model)).quantizers == 4 + 2**depth
    else:
        assert "node hidden.Q (QuantizeLinear): its scale 'hidden.scale' must be finite" in refusal(write_onnx(model))


def test_a_scale_may_be_a_constant_but_not_computed(model, write_onnx):
    node(model, "q").input[1] = "c"
    scale = numpy_helper.from_array(np.float32(0.25))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=scale))
    assert open_onnx(write_onnx(model)).quantizers == 4
    model.graph.node.insert(1, helper.make_node("Abs", ["c"], ["made"]))
    node(model, "q").input[1] = "made"
    assert "its scale 'made' is missing, or computed" in refusal(write_onnx(model))


def test_several_inputs_are_described_as_one_row(model, write_onnx):
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT64, ["batch", 2]))
    file = open_onnx(write_onnx(model))
    first = file.inputs.parts[0]
    assert file.inputs.kinds[1:] == [("more", (2,), "int64")] and file.batch is None
    row = torch.arange(file.channels).float()[None]
    given = as_input(file, row.repeat(3, 1))
    assert given["more"].tolist() == [[first.size, first.size + 1]] * 3 and given["more"].dtype == np.int64
    assert given[first.name].shape == (3, *first.shape)


def test_external_data_unknown_to_the_card_is_refused(net, artifact_of, tmp_path):
    artifact = artifact_of(net)
    model = onnx.load(artifact.file)
    (tmp_path / "x.data").write_bytes(external(model, "fc1.bias", location="x.data"))
    artifact.file.write_bytes(model.SerializeToString())
    with pytest.raises(SwinQuantError, match="does not know its external data x.data"):
        verified(artifact)


def test_a_fixed_batch_is_filled_up_and_cut_again(small_net, write_onnx):
    file = open_onnx(write_onnx(small_net(batch=4).proto()))
    images = torch.randn(3, 3, 8, 8)
    array = as_input(file, images)[file.input]
    assert array.shape == (4, 3, 8, 8) and not array[3].any() and (array[:3] == images.numpy()).all()
    assert as_output([np.arange(20.0).reshape(4, 5)], images).tolist() == np.arange(15.0).reshape(3, 5).tolist()
    maps = as_output([np.zeros((4, 5, 2, 3)), np.zeros((4, 10, 1, 2))], images)
    assert [list(part.shape) for part in maps] == [[3, 5, 2, 3], [3, 10, 1, 2]]
    with pytest.raises(UsageError, match="is for batches of 4, not 5"):
        as_input(file, torch.zeros(5, 3, 8, 8))
