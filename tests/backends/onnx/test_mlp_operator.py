"""A branch with its MLP as one operator: what it computes, on plain loops and vectors, and which files have it."""

from math import erf, pi

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from operator_nodes import assert_near, compiled, linear, normalised, one_node, product, stream, without_library

from swin_quant.backends.onnx.swin.int8_operators import mlp
from swin_quant.backends.onnx_reader.checks import check_scales, infer_shapes
from swin_quant.backends.openvino import engine
from swin_quant.base.errors import SwinQuantError
from swin_quant.score.options import EngineOptions

MLP = ("mlp=swin_quant::Mlp",)


def constants(width, hidden, x_zero=None, hidden_zero=9, gated=False):
    """The operator's constants, in order; int8 where a zero point is None."""
    random = np.random.default_rng(0)
    norm = random.standard_normal((2, width)).astype(np.float32)
    first = linear(random, width, hidden * (1 + gated), 0.03, x_zero)
    return [*norm, *first, *linear(random, hidden, width, 0.015, hidden_zero)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {  # in float64, by their definitions
    "gelu": lambda x: x * (1 + np.vectorize(erf, otypes=[float])(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
}


def brute_force(x, constants, norm_last, activation="gelu"):
    """x plus its branch, products in integers, all else in float64."""
    *norm, x = *constants[:2], x.astype(float)
    y = product(x if norm_last else normalised(x, *norm), *constants[2:7])
    gate, *gated = np.split(y, y.shape[-1] // len(constants[9]), -1)
    y = product(ACTIVATIONS[activation](gate) * (gated[0] if gated else 1), *constants[7:])
    return x + (normalised(y, *norm) if norm_last else y)


def file_of(constants, norm_last, **attributes):
    return one_node("Mlp", constants, norm_last=int(norm_last), **attributes)


CASES = [  # width, hidden, zero points, whether it has gates
    (96, 384, None, 9),
    (32, 64, 131, None),  # uint8 in, int8 inside; one panel of 32 columns
    (160, 128, None, None),
    (10, 20, None, 9),  # no widths of the fast loops
    (96, 192, 131, 9, True),
    (32, 64, None, None, True),
    (10, 20, None, 9, True),
]
SHAPES = [(1, 1), (1, 5), (2, 7), (3, 101), (2, 0)]  # less than a row of the loops, tiles that are not full, none


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("norm_last", [False, True])
def test_the_compiled_operator_is_brute_force_but_for_ties(case, norm_last, library):
    given = constants(*case)
    for threads in (1, 2):
        model = compiled(library, file_of(given, norm_last), threads)
        for shape in SHAPES:
            x = stream(*shape, case[0])
            assert_near(model(x), brute_force(x, given, norm_last), x)
    x[:] = np.nan
    both = np.concatenate([stream(2, 7, case[0])[:1], np.full((1, 7, case[0]), np.nan, np.float32)])
    assert np.isnan(found := model(both))[1].all() and np.isfinite(found[0]).all()


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("case", [*CASES[:2], CASES[4]], ids=["zero point behind GELU", "zero point in front", "gated"])
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case, norm_last):
    given, x = constants(*case), stream(2, 7, case[0])
    wanted = brute_force(x, given, norm_last)
    file, arrays = file_of(given, norm_last), (x, *given)
    for found in without_library(mlp, "Mlp", file, arrays, norm_last=int(norm_last)):
        assert_near(found, wanted, x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_brute_force(activation, library):
    """On vectors, where it is a table of polynomials, on plain loops, in torch, and in the ONNX function."""
    for case in (CASES[0], *CASES[3:5]):
        given, x = constants(*case), stream(2, 50, case[0])
        wanted = brute_force(x, given, False, activation)
        file = file_of(given, False, activation=activation)
        assert_near(compiled(library, file)(x), wanted, x)
        for found in without_library(mlp, "Mlp", file, (x, *given), norm_last=0, activation=activation):
            assert_near(found, wanted, x)


def test_an_activation_that_the_library_lacks_is_refused(library):
    with pytest.raises(RuntimeError, match="Mlp: has no activation mish"):
        compiled(library, file_of(constants(32, 64), False, activation="mish"))


@pytest.mark.parametrize("kind, policy", [pytest.param("swin", "qdq", marks=pytest.mark.kernels), ("swinv2", "cpu")])
def test_a_file_with_the_operator_is_the_plain_file(kind, policy, exported, run, images):
    plain, own = exported(kind, policy), exported(kind, policy, plugin=MLP)
    graph = onnx.load(own.file).graph
    nodes = [node for node in graph.node if node.op_type == "Mlp"]
    assert len(nodes) == 3 and own.record["options"]["plugin"] == list(MLP)
    held = {one.name: one for one in graph.initializer}
    assert all(len(node.input) == 13 and set(node.input[1:]) <= held.keys() for node in nodes)
    assert {helper.get_node_attr_value(node, "norm_last") for node in nodes} == {int(kind == "swinv2")}
    zero = numpy_helper.to_array(held[nodes[0].input[9]])
    assert zero.dtype == (np.uint8 if policy == "cpu" else np.int8)
    difference = run(own.file, images)["logits"] - run(plain.file, images)["logits"]
    assert np.abs(difference).mean() < 0.005


@pytest.mark.parametrize("float_type", ["float32", "bfloat16"])
def test_openvino_runs_a_file_with_the_operator(float_type, exported, with_operators, images):
    if float_type not in engine.float_types():
        pytest.skip(f"no {float_type}")
    options = EngineOptions(threads=1, float_type=float_type)
    plain, own = (engine.load(exported("swinv2", "cpu", **one), options) for one in ({}, {"plugin": MLP}))
    assert with_operators.name in own.details["extensions"]
    wanted, found = plain(images), own(images)
    assert float((found - wanted).square().sum() / wanted.square().sum()) < (1e-3 if float_type == "bfloat16" else 1e-4)


@pytest.mark.parametrize("place, said", [(3, "must be finite and above zero"), (13, "its graph makes no sense")])
def test_a_scale_that_a_call_gives_to_the_function_is_checked(place, said, exported, tmp_path):
    model = onnx.load(exported("swinv2", "cpu", plugin=MLP).file)
    node = next(node for node in model.graph.node if node.op_type == "Mlp")
    if place < len(node.input):
        scale = next(one for one in model.graph.initializer if one.name == node.input[place])
        scale.CopyFrom(numpy_helper.from_array(np.float32(0), scale.name))
    else:
        del node.input[3:]
    with pytest.raises(SwinQuantError, match=said):
        check_scales(infer_shapes(model), tmp_path)
