"""Patch merging as one operator: what it computes, on plain loops and vectors, and which files have it."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx.functions import function_of
from swin_quant.backends.onnx.swin.int8_operators import patch_merging
from swin_quant.backends.openvino import engine
from swin_quant.backends.openvino.operators import stream_in_half
from swin_quant.operators.plugins import Node, Plugin
from swin_quant.score.options import EngineOptions

EPSILON = 1e-5
MERGING = ("patch_merging=swin_quant::PatchMerging",)
CASES = [(32, False, None), (64, True, 131), (6, False, 131), (6, True, None)]  # channels, norm last, zero point


def constants(channels, norm_last, zero, tokens=4 * 25):
    random = np.random.default_rng(channels)
    wide, out = 4 * channels, 2 * channels
    scales = random.uniform(0.5, 1, out) / (60 * wide**0.5)
    return [
        random.permutation(tokens).astype(np.int32),
        *random.standard_normal((2, out if norm_last else wide)).astype(np.float32),
        np.float32(0.03), np.int8(0) if zero is None else np.uint8(zero),
        random.integers(-128, 128, (wide, out), np.int8), scales.astype(np.float32),
        random.standard_normal(out).astype(np.float32),
    ]  # fmt: skip


def brute_force(x, constants, norm_last):
    """Products in integers, all else in float64."""
    places, gain, bias, scale, zero, weight, scales, offset = constants

    def normalised(y):
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + EPSILON) * gain + bias

    y = np.concatenate([x.astype(float)[:, places[i::4]] for i in range(4)], -1)
    y = y if norm_last else normalised(y)
    ends = np.iinfo(zero.dtype)
    levels = np.clip(np.round(y / scale.astype(float)) + int(zero), ends.min, ends.max).astype(np.int64) - int(zero)
    y = levels @ weight.astype(np.int64) * (scale.astype(float) * scales) + offset
    return normalised(y) if norm_last else y


def assert_is(found, wanted, limit=1e-6):
    """But for levels of values that lie between two, and results between two numbers of bfloat16 (limit 2e-5)."""
    assert found.shape == wanted.shape
    assert np.square(found - wanted).sum() <= limit * np.square(wanted).sum()


def one_node(constants, norm_last):
    names = ["x", *(f"c{place}" for place in range(len(constants)))]
    node = helper.make_node(
        "PatchMerging", names, ["y"], domain="swin_quant", norm_last=int(norm_last), epsilon=EPSILON
    )
    held = [numpy_helper.from_array(value, name) for name, value in zip(names[1:], constants, strict=True)]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", f"b{name}", f"c{name}"]) for name in ("x", "y")
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("swin_quant", 1)]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def stream(batch, constants):
    shape = batch, len(constants[0]), constants[5].shape[0] // 4
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_operator_is_brute_force_but_for_ties(case, library):
    import openvino

    given, norm_last = constants(*case), case[1]
    core = openvino.Core()
    core.add_extension(str(library))
    file = core.read_model(one_node(given, norm_last))
    wanted = brute_force(x := stream(9, given), given, norm_last)
    for threads in (1, 2):
        model = core.compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"})
        for batch in (9, 1, 0):
            assert_is(model([x[:batch]])[0], wanted[:batch])
    x[1] = np.nan
    assert_is(model([x])[0][0], wanted[0])
    if "bfloat16" in engine.float_types():
        stream_in_half(file)
        x = torch.from_numpy(stream(2, given)).bfloat16().float().numpy()
        found = core.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})([x])[0]
        assert_is(found, torch.from_numpy(brute_force(x, given, norm_last)).bfloat16().float().numpy(), 2e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case):
    onnxruntime = pytest.importorskip("onnxruntime")
    given, norm_last = constants(*case), case[1]
    wanted = brute_force(x := stream(2, given), given, norm_last)
    tensors = [torch.from_numpy(np.asarray(one)) for one in (x, *given)]
    assert_is(patch_merging(*tensors, norm_last=norm_last, epsilon=EPSILON).numpy(), wanted)
    node = Node(tuple(tensors), {"norm_last": int(norm_last), "epsilon": EPSILON}, ())
    for opset in (17, 20):
        model = onnx.ModelProto.FromString(one_node(given, norm_last))
        model.opset_import[0].version, model.ir_version = opset, 8
        model.functions.append(function_of(Plugin("patch_merging", "swin_quant", "PatchMerging"), [node], opset))
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        assert_is(session.run(None, {"x": x})[0], wanted)


@pytest.mark.parametrize("kind, policy", [pytest.param("swin", "qdq", marks=pytest.mark.slow), ("swinv2", "cpu")])
def test_a_file_with_the_operator_is_the_plain_file(kind, policy, exported, with_operators):
    plain, own = exported(kind, policy), exported(kind, policy, plugin=MERGING)
    nodes = [node for node in onnx.load(own.file).graph.node if node.op_type == "PatchMerging"]
    assert len(nodes) == 1 and len(nodes[0].input) == 9
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    wanted, found = (engine.load(one, EngineOptions(threads=1))(images) for one in (plain, own))
    assert float((found - wanted).square().sum() / wanted.square().sum()) < 1e-4
