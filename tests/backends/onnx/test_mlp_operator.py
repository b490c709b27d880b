"""A branch with its MLP as one operator: what it computes, on plain loops and vectors, and which files have it."""

from collections import Counter
from math import erf

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx.functions import function_of
from swin_quant.backends.onnx.swin.int8_operators import mlp
from swin_quant.backends.onnx_reader.checks import check_scales
from swin_quant.backends.onnx_reader.file import open_onnx
from swin_quant.backends.onnxruntime.engine import products
from swin_quant.backends.openvino import engine
from swin_quant.backends.openvino.operators import stream_in_half
from swin_quant.base.errors import SwinQuantError
from swin_quant.operators.plugins import Node, Plugin
from swin_quant.score.options import EngineOptions

EPSILON = 1e-5
MLP = ("mlp=swin_quant::Mlp",)


def constants(width, hidden, x_zero=None, hidden_zero=9, seed=0):
    """The operator's constants, in order; int8 where a zero point is None."""
    random = np.random.default_rng(seed)

    def linear(inputs, columns, scale, zero):
        values = random.integers(-128, 128, (inputs, columns), np.int8)
        scales = random.uniform(0.5, 1, columns) / (60 * inputs**0.5)
        bias = random.standard_normal(columns)
        zero = np.int8(0) if zero is None else np.uint8(zero)
        return [np.float32(scale), zero, values, scales.astype(np.float32), bias.astype(np.float32)]

    norm = random.standard_normal((2, width)).astype(np.float32)
    return [*norm, *linear(width, hidden, 0.03, x_zero), *linear(hidden, width, 0.015, hidden_zero)]


def brute_force(x, constants, norm_last):
    """x plus its branch, products in integers, all else in float64."""
    gain, bias, *linears = constants

    def normalised(y):
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + EPSILON) * gain + bias

    def linear(y, scale, zero, weight, scales, bias):
        ends = np.iinfo(zero.dtype)
        levels = np.clip(np.round(y / scale.astype(float)) + int(zero), ends.min, ends.max).astype(np.int64) - int(zero)
        return levels @ weight.astype(np.int64) * (scale.astype(float) * scales) + bias

    x = x.astype(float)
    y = linear(x if norm_last else normalised(x), *linears[:5])
    y = linear(y * (1 + np.vectorize(erf, otypes=[float])(y / 2**0.5)) / 2, *linears[5:])
    return x + (normalised(y) if norm_last else y)


def assert_is(found, wanted, x):
    """But for levels of values that lie between two: one of 256 that is wrong everywhere costs 1e-5 of the energy."""
    assert found.shape == wanted.shape
    assert np.square(found - wanted).sum() <= 1e-6 * np.square(wanted - x).sum()


def one_node(constants, norm_last):
    names = ["x", *(f"c{place}" for place in range(len(constants)))]
    node = helper.make_node("Mlp", names, ["y"], domain="swin_quant", norm_last=int(norm_last), epsilon=EPSILON)
    held = [numpy_helper.from_array(value, name) for name, value in zip(names[1:], constants, strict=True)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b", "c"]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("swin_quant", 1)]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def stream(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


CASES = [  # width, hidden, zero points
    (96, 384, None, 9),
    (32, 64, 131, None),  # uint8 in, int8 inside; one panel of 32 columns
    (160, 128, None, None),
    (10, 20, None, 9),  # no widths of the fast loops
]
SHAPES = [(1, 1), (1, 5), (2, 7), (3, 101), (2, 0)]  # less than a row of the loops, tiles that are not full, none


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("norm_last", [False, True])
def test_the_compiled_operator_is_brute_force_but_for_ties(case, norm_last, library):
    import openvino

    given = constants(*case)
    core = openvino.Core()
    core.add_extension(str(library))
    file = core.read_model(one_node(given, norm_last))
    for threads in (1, 2):
        model = core.compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"})
        for shape in SHAPES:
            x = stream(*shape, case[0])
            assert_is(model([x])[0], brute_force(x, given, norm_last), x)
    x[:] = np.nan
    both = np.concatenate([stream(2, 7, case[0])[:1], np.full((1, 7, case[0]), np.nan, np.float32)])
    assert np.isnan(found := model([both])[0])[1].all() and np.isfinite(found[0]).all()


@pytest.mark.parametrize("norm_last", [False, True])
def test_a_stream_in_bfloat16(norm_last, library):
    """The engine lets the operator read and write what lies around it: only both ends are rounded."""
    import openvino

    given = constants(*CASES[0])
    core = openvino.Core()
    core.add_extension(str(library))
    file = core.read_model(one_node(given, norm_last))
    stream_in_half(file)
    if "bfloat16" not in engine.float_types():
        pytest.skip("no bfloat16")
    model = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    x = torch.from_numpy(stream(3, 101, 96)).bfloat16().float().numpy()
    wanted = torch.from_numpy(brute_force(x, given, norm_last)).bfloat16().float().numpy()
    assert_is(model([x])[0], wanted, x)


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("case", CASES[:2], ids=["zero point behind GELU", "zero point in front"])
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case, norm_last):
    onnxruntime = pytest.importorskip("onnxruntime")
    given, x = constants(*case), stream(2, 7, case[0])
    wanted = brute_force(x, given, norm_last)
    tensors = [torch.from_numpy(np.asarray(one)) for one in (x, *given)]
    assert_is(mlp(*tensors, norm_last=norm_last, epsilon=EPSILON).numpy(), wanted, x)
    node = Node(tuple(tensors), {"norm_last": int(norm_last), "epsilon": EPSILON}, ())
    for opset in (17, 20):
        model = onnx.ModelProto.FromString(one_node(given, norm_last))
        model.opset_import[0].version, model.ir_version = opset, 8
        model.functions.append(function_of(Plugin("mlp", "swin_quant", "Mlp"), [node], opset))
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        assert_is(session.run(None, {"x": x})[0], wanted, x)


@pytest.mark.parametrize("kind, policy", [pytest.param("swin", "qdq", marks=pytest.mark.slow), ("swinv2", "cpu")])
def test_a_file_with_the_operator_is_the_plain_file(kind, policy, exported, run, tmp_path):
    plain, own = exported(kind, policy), exported(kind, policy, plugin=MLP)
    graph = onnx.load(own.file).graph
    nodes = [node for node in graph.node if node.op_type == "Mlp"]
    assert len(nodes) == 3 and own.record["options"]["plugin"] == list(MLP)
    held = {one.name: one for one in graph.initializer}
    assert all(len(node.input) == 13 and set(node.input[1:]) <= held.keys() for node in nodes)
    assert {helper.get_node_attr_value(node, "norm_last") for node in nodes} == {int(kind == "swinv2")}
    zero = numpy_helper.to_array(held[nodes[0].input[9]])
    assert zero.dtype == (np.uint8 if policy == "cpu" else np.int8)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    difference = run(own.file, images)["logits"] - run(plain.file, images)["logits"]
    assert np.abs(difference).mean() < 0.005


@pytest.mark.slow
def test_whoever_fixes_the_batch_keeps_the_integer_products_of_the_function(exported):
    pytest.importorskip("onnxruntime")
    file = open_onnx(exported("swin", "cpu", plugin=MLP).file)
    symbolic, fixed = (Counter(products(file, batch).values()) for batch in (None, 2))
    assert symbolic == fixed and symbolic["int8"] >= 12


@pytest.mark.parametrize("float_type", ["float32", "bfloat16"])
def test_openvino_runs_a_file_with_the_operator(float_type, exported, with_operators):
    if float_type not in engine.float_types():
        pytest.skip(f"no {float_type}")
    options = EngineOptions(threads=1, float_type=float_type)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain, own = (engine.load(exported("swin", "cpu", **one), options) for one in ({}, {"plugin": MLP}))
    assert with_operators.name in own.details["extensions"]
    wanted, found = plain(images), own(images)
    assert float((found - wanted).square().sum() / wanted.square().sum()) < (1e-3 if float_type == "bfloat16" else 1e-4)


@pytest.mark.parametrize("place, said", [(3, "must be finite and above zero"), (13, "is missing")])
def test_a_scale_that_a_call_gives_to_the_function_is_checked(place, said, exported, tmp_path):
    model = onnx.load(exported("swin", "cpu", plugin=MLP).file)
    node = next(node for node in model.graph.node if node.op_type == "Mlp")
    if place < len(node.input):
        scale = next(one for one in model.graph.initializer if one.name == node.input[place])
        scale.CopyFrom(numpy_helper.from_array(np.float32(0), scale.name))
    else:
        del node.input[3:]
    with pytest.raises(SwinQuantError, match=said):
        check_scales(model.graph, tmp_path, model.functions)
