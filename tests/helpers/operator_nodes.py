"""A node of ours alone in a graph: its constants and brute force, run by the compiled library, or as a function."""

from functools import cache
from math import erf, pi

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.onnx.functions import build_function
from swin_quant.backends.openvino.engine import float_types
from swin_quant.backends.openvino.operators import COMPILED, stream_in_half
from swin_quant.backends.saturation import saturates, without_saturation
from swin_quant.operators.plugins import Node, Plugin
from swin_quant.quant.policy import load_policy

EPSILON = 1e-5


def exact_policy(name):
    """A policy whose plain linears OpenVINO computes as fake-quant does: weights of 7 bits where 8 bits saturate."""
    policy = load_policy(name)
    return without_saturation(policy) if saturates("openvino") else policy


def linear(random, inputs, columns, scale, zero):
    """The constants of an int8 linear; without a zero point its input is int8."""
    zero = np.int8(0) if zero is None else np.uint8(zero)
    values = random.integers(-128, 128, (inputs, columns), np.int8)
    scales = random.uniform(0.5, 1, columns) / (60 * inputs**0.5)
    return [np.float32(scale), zero, values, scales.astype(np.float32), random.normal(size=columns).astype(np.float32)]


def product(y, scale, zero, weight, scales, bias):
    """The linear's result, by exact sums of integers in float64."""
    ends = np.iinfo(zero.dtype)
    levels = np.clip(np.round(y / scale.astype(float)) + int(zero), ends.min, ends.max) - int(zero)
    return levels @ weight.astype(float) * (scale.astype(float) * scales) + bias


def normalised(y, gain, bias, epsilon=EPSILON):
    return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + epsilon) * gain + bias


def attended(q, k, v, added, lengths, scales):
    """softmax(q k^T + added) v in float64, for q, k and v [..., heads, L, D]; with `lengths` q and k are normalised.

    All three are rounded to int8 by their scales, and the softmax by a fourth.
    """

    def rounded(y, scale):
        return np.clip(np.round(y / scale), -128, 127) * scale

    if lengths:
        q = q / np.linalg.norm(q, axis=-1, keepdims=True) * lengths[0].astype(float)[:, None, None]
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    q, k, v = (rounded(part, scale) for part, scale in zip((q, k, v), scales, strict=False))
    logits = q @ k.swapaxes(-2, -1) + added
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return (rounded(shares, scales[3]) if len(scales) > 3 else shares) @ v


def token_branch(x, gain, bias, *constants, heads, scales, norm_last, epsilon=EPSILON, parts=""):
    """Attention's branch among all tokens, in float64."""
    x, norm, own = x.astype(float), (gain, bias, epsilon), iter(constants[10:])
    y = product(x if norm_last else normalised(x, *norm), *constants[:5])
    q, k, v = y.reshape(*x.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
    added = next(own)[:, next(own)] if "bias" in parts else 0.0
    if "layer_norm" in parts:
        norms = next(own)
        q, k = normalised(q, *norms[:2], epsilon), normalised(k, *norms[2:], epsilon)
    if "rotary" in parts:
        turns = next(own)
        q, k = (one * turns[0] + np.roll(one, one.shape[-1] // 2, -1) * turns[1] for one in (q, k))
    y = product(attended(q, k, v, added, (), scales).swapaxes(1, 2).reshape(x.shape), *constants[5:10])
    return x + (normalised(y, *norm) if norm_last else y)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {  # by their definitions
    "gelu": lambda x: x * (1 + np.vectorize(erf, otypes=[float])(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
}


def mlp(x, gain, bias, *linears, norm_last, epsilon=EPSILON, activation="gelu"):
    """An MLP's branch in float64; a second half of the first linear is a gate."""
    x, hidden = x.astype(float), len(linears[7])
    y = product(x if norm_last else normalised(x, gain, bias, epsilon), *linears[:5])
    y = ACTIVATIONS[activation](y[..., :hidden]) * (y[..., hidden:] if y.shape[-1] > hidden else 1)
    y = product(y, *linears[5:])
    return x + (normalised(y, gain, bias, epsilon) if norm_last else y)


def stream(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


def one_node(operator, constants, ranks=(3, 3), **attributes):
    """The file of a graph x -> y of one operator; `ranks`: of x and y."""
    names = ["x", *(f"c{place}" for place in range(len(constants)))]
    node = helper.make_node(COMPILED[operator], names, ["y"], domain="swin_quant", epsilon=EPSILON, **attributes)
    held = [numpy_helper.from_array(value, name) for name, value in zip(names[1:], constants, strict=True)]
    sizes = {end: ["a", *(f"{end}{i}" for i in range(1, rank))] for end, rank in zip("xy", ranks, strict=True)}
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, sizes[end]) for end in "xy"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("swin_quant", 1)]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


@cache
def core_with(library):
    """OpenVINO with the library, kept for as long as the process lives: a Core gives the main thread a signal stack and
    takes it with it. Two that do not end in the order of a stack leave a freed one, and the next signal crashes."""
    import openvino

    core = openvino.Core()
    core.add_extension(library)
    return core


def compiled(library, file, threads=1, in_half=False):
    """The file in OpenVINO with the library: x -> y."""
    core = core_with(str(library))
    read = core.read_model(file)
    if in_half:
        if "bfloat16" not in float_types():
            pytest.skip("no bfloat16")
        stream_in_half(read)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16" if in_half else "f32"}
    model = core.compile_model(read, "CPU", settings)
    return lambda x: model([x])[0]


def without_library(operator, file, arrays, **attributes):
    """The results of the file with the operator's ONNX function on ONNX Runtime, in each opset."""
    import onnxruntime

    attributes["epsilon"], settings = EPSILON, onnxruntime.SessionOptions()
    if saturates("onnxruntime"):  # not without its optimizations
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    tensors = tuple(torch.from_numpy(np.asarray(one)) for one in arrays)
    for opset in (17, 20):
        model = onnx.ModelProto.FromString(file)
        model.opset_import[0].version, model.ir_version = opset, 8
        plugin, node = Plugin(operator, "swin_quant", COMPILED[operator]), Node(tensors, attributes, ())
        model.functions.append(build_function(plugin, [node], opset))
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        yield session.run(None, {"x": arrays[0]})[0]


def assert_near(found, wanted, base=0.0, limit=1e-6):
    """But for levels of values that lie between two: `limit` is the share of the energy of what is added to `base`.

    One of 256 levels that is wrong everywhere costs 1e-5. A kernel of attention has 1e-4: its exponentials are rounded
    to 8 bits.
    """
    assert found.shape == wanted.shape
    assert np.square(found - wanted).sum() <= limit * np.square(wanted - base).sum()


def in_bfloat16(array):
    """The array, float32, rounded to bfloat16."""
    return torch.from_numpy(array).bfloat16().float().numpy()
