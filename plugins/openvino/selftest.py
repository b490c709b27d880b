"""Checks a library of the operators: selftest.py LIBRARY ends with an error unless it computes them as numpy does.

A program of its own: a library that crashes takes nothing else with it.
"""

import math
import sys

import numpy as np
import openvino
from onnx import TensorProto, helper, numpy_helper

HEADS, DEPTH, SIDE, WINDOWS = 2, 32, 7, 4
LENGTH = SIDE * SIDE
SCALES = [0.02, 0.03, 0.02, 0.004]  # of q, k, v and the result
EPSILON = 1e-5
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
TOKENS, WIDTH, HIDDEN = 101, 96, 128  # no whole tiles; a panel of 64 columns and one of 32


def one_node(name: str, inputs: list, results: int, constants: dict, **attributes: object) -> bytes:
    """An ONNX file of one node. inputs: (name, type); results: its type; of rank 4 for maps and pictures, else 3."""
    node = helper.make_node(
        name, [one for one, _ in inputs] + list(constants), ["y"], domain="swin_quant", **attributes
    )
    ranks = {"MapBranch": (4, 4), "PatchEmbedding": (4, 3)}.get(name, (3, 3))
    shown = [
        helper.make_tensor_value_info(one, kind, ["a", *(f"{one}{i}" for i in range(1, rank))])
        for (one, kind), rank in zip([*inputs, ("y", results)], [ranks[0]] * len(inputs) + [ranks[1]], strict=True)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("swin_quant", 1)]
    held = [numpy_helper.from_array(value, one) for one, value in constants.items()]
    graph = helper.make_graph([node], "one", shown[:-1], shown[-1:], held)
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def attention(x: np.ndarray, constant: np.ndarray) -> np.ndarray:
    """The levels of the result, not rounded."""
    parts = x.astype(np.float64).reshape(-1, WINDOWS, LENGTH, 3, HEADS, DEPTH).transpose(3, 0, 1, 4, 2, 5)
    q, k, v = (part * scale for part, scale in zip(parts, SCALES, strict=False))
    logits = q @ k.swapaxes(-2, -1) + constant.reshape(WINDOWS, HEADS, LENGTH, LENGTH)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    result = shares / shares.sum(-1, keepdims=True) @ v / SCALES[-1]
    return np.clip(result.swapaxes(2, 3).reshape(len(x), -1, HEADS * DEPTH), -128, 127)


def int8_linear(
    y: np.ndarray, scale: float, zero: float, w: np.ndarray, scales: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """The result, in float64. A zero point is uint8, and 0 int8."""
    lowest = -128 if zero == 0 else 0
    return (np.clip(np.round(y / scale) + zero, lowest, lowest + 255) - zero) @ w * (scale * scales) + b


def mlp(x: np.ndarray, constants: dict, norm_last: bool) -> np.ndarray:
    """The result, in float64."""
    gain, bias, *linears = (value.astype(float) for value in constants.values())

    def normalised(y: np.ndarray) -> np.ndarray:
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + EPSILON) * gain + bias

    y = int8_linear(x if norm_last else normalised(x), *linears[:5])
    gate, *gated = np.split(y, y.shape[-1] // len(linears[7]), -1)
    y = gate * (1 + np.vectorize(math.erf)(gate / 2**0.5)) / 2 * (gated[0] if gated else 1)
    y = int8_linear(y, *linears[5:])
    return x + (normalised(y) if norm_last else y)


def attention_branch(x: np.ndarray, constants: dict) -> np.ndarray:
    """The result, in float64."""
    places, gain, bias, *linears, table, index, regions = (value.astype(float) for value in constants.values())
    x = x[:, places.astype(int)]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * gain + bias
    y = int8_linear(y, *linears[:5])
    levels = np.clip(np.round(y / np.repeat(SCALES[:3], HEADS * DEPTH)), -128, 127)
    mask = -100.0 * (regions[:, None, :, None] != regions[:, None, None])
    constant = table[:, index.astype(int)] + mask
    return x + int8_linear(attention(levels, constant) * SCALES[3], *linears[5:])


def token_branch(x: np.ndarray, constants: dict) -> np.ndarray:
    """The result, in float64, for heads of 64 channels; with position biases, normal q and k, and a rotation."""
    gain, bias, *linears = (value.astype(float) for value in list(constants.values())[:12])
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * gain + bias
    y = int8_linear(y, *linears[:5])
    parts = y.reshape(*x.shape[:2], 3, -1, 2 * DEPTH).transpose(2, 0, 3, 1, 4)
    added: np.ndarray | float = 0.0
    if len(constants) > 12:
        table, index, norms, factors = list(constants.values())[12:]
        added = table[:, index]
        for i, part in enumerate(parts[:2]):
            normal = (part - part.mean(-1, keepdims=True)) / np.sqrt(part.var(-1, keepdims=True) + EPSILON)
            normal = normal * norms[2 * i] + norms[2 * i + 1]
            part[:] = normal * factors[0] + np.roll(normal, DEPTH, -1) * factors[1]
    rounded = [np.clip(np.round(part / scale), -128, 127) for part, scale in zip(parts, SCALES, strict=False)]
    q, k, v = (part * scale for part, scale in zip(rounded, SCALES, strict=False))
    logits = q @ k.swapaxes(-2, -1) + added
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    y = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(x.shape)
    return x + int8_linear(y, *linears[5:])


def map_branch(x: np.ndarray, constants: dict) -> np.ndarray:
    """The result, in float64, for a map lower than its windows, which are not shifted."""
    gain, bias, *linears, table, index = (value.astype(float) for value in constants.values())
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * gain + bias
    y = np.pad(y, [(0, 0), (0, SIDE - x.shape[1]), (0, 0), (0, 0)])
    y = y.reshape(len(x), SIDE, WINDOWS, SIDE, -1).swapaxes(1, 2).reshape(len(x), WINDOWS * LENGTH, -1)
    y = int8_linear(y, *linears[:5])
    levels = np.clip(np.round(y / np.repeat(SCALES[:3], HEADS * DEPTH)), -128, 127)
    constant = np.repeat(table[None, :, index.astype(int)], WINDOWS, 0)
    y = int8_linear(attention(levels, constant) * SCALES[3], *linears[5:])
    y = y.reshape(len(x), WINDOWS, SIDE, SIDE, -1).swapaxes(1, 2).reshape(len(x), SIDE, x.shape[2], -1)
    return x + y[:, : x.shape[1]]


def patch_merging(x: np.ndarray, constants: dict) -> np.ndarray:
    """The result, in float64."""
    gain, bias, *of_linear, places = (value.astype(float) for value in constants.values())
    y = x[:, places.astype(int)].reshape(len(x), -1, 4 * x.shape[-1]).astype(float)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + EPSILON) * gain + bias
    return int8_linear(y, *of_linear)


def patch_embedding(x: np.ndarray, constants: dict) -> np.ndarray:
    """The result, in float64."""
    filters, offsets, gain, bias, places = (value.astype(float) for value in constants.values())
    side = filters.shape[-1]
    y = x.reshape(len(x), x.shape[1], x.shape[2] // side, side, -1, side).transpose(0, 2, 4, 1, 3, 5)
    y = y.reshape(len(x), -1, filters[0].size)[:, places.astype(int)] @ filters.reshape(len(filters), -1).T + offsets
    return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + EPSILON) * gain + bias


def main() -> None:
    core = openvino.Core()
    core.add_extension(sys.argv[1])
    random = np.random.default_rng(0)
    floats, eight = TensorProto.FLOAT, TensorProto.INT8

    file = one_node("Attention", [("x", eight), ("c", floats)], eight, {}, heads=HEADS, scales=SCALES)
    x = random.integers(-128, 128, (2, WINDOWS * LENGTH, 3 * HEADS * DEPTH), np.int8)
    constant = random.standard_normal((WINDOWS * HEADS, LENGTH, LENGTH)).astype(np.float32)
    off = np.abs(core.compile_model(core.read_model(file), "CPU")([x, constant])[0] - attention(x, constant))
    if off.max() > 4 or off.mean() > 0.5:  # levels: exponentials are rounded to 8 bits; rounding alone costs 0.25
        raise SystemExit(f"attention is {off.mean():.2f} levels off, {off.max():.1f} at most")

    x = random.standard_normal((3, TOKENS, WIDTH)).astype(np.float32)
    constants = {name: random.standard_normal(WIDTH).astype(np.float32) for name in ("gain", "bias")}
    constants |= {"scale": np.float32(0.03), "zero": np.int8(0)} | linear(random, 1, WIDTH, HIDDEN)
    constants |= {"of_hidden": np.float32(0.02), "hidden_zero": np.uint8(9)} | linear(random, 2, HIDDEN, WIDTH)
    gated = constants | linear(random, 1, WIDTH, 2 * HIDDEN)
    for last, own in ((False, constants), (True, constants), (False, gated)):
        file = one_node("Mlp", [("x", floats)], floats, own, norm_last=int(last), epsilon=EPSILON)
        found, wanted = core.compile_model(core.read_model(file), "CPU", EXACT)([x])[0], mlp(x, own, last)
        noise = np.square(found - wanted).sum() / np.square(wanted - x).sum()
        if not noise < 1e-6:  # levels differ where a value lies between two
            raise SystemExit(f"the MLP is {noise:.1e} of its energy off")

    width, tokens = HEADS * DEPTH, WINDOWS * LENGTH
    constants = {"places": random.permutation(tokens).astype(np.int32)}
    constants |= {name: random.standard_normal(width).astype(np.float32) for name in ("gain", "bias")}
    constants |= {"scale": np.float32(0.03), "zero": np.int8(0)} | linear(random, 1, width, 3 * width)
    constants |= {"of_result": np.float32(SCALES[3]), "no_zero": np.int8(0)} | linear(random, 2, width, width)
    constants |= {"table": random.standard_normal((HEADS, 169)).astype(np.float32)}
    constants |= {"index": random.integers(0, 169, (LENGTH, LENGTH), np.int32)}
    constants |= {"regions": random.integers(0, 3, (WINDOWS, LENGTH), np.uint8)}
    x = random.standard_normal((3, tokens, width)).astype(np.float32)
    attributes = {"heads": HEADS, "scales": SCALES[:3], "norm_last": 0, "epsilon": EPSILON}
    file = one_node("AttentionBranch", [("x", floats)], floats, constants, **attributes)
    found, wanted = core.compile_model(core.read_model(file), "CPU", EXACT)([x])[0], attention_branch(x, constants)
    noise = np.square(found - wanted).sum() / np.square(wanted - x[:, constants["places"]]).sum()
    if not noise < 1e-4:  # exponentials are rounded to 8 bits
        raise SystemExit(f"the branch with attention is {noise:.1e} of its energy off")

    tokens_alone = {name: constants[name] for name in list(constants)[1:13]}
    attributes |= {"heads": HEADS // 2}
    more = {"table2": random.standard_normal((1, 169)).astype(np.float32)}
    more |= {"index2": random.integers(0, 169, (tokens, tokens), np.int32)}
    more |= {"norms": random.uniform(0.5, 1, (4, width)).astype(np.float32)}
    more |= {"factors": random.uniform(-1, 1, (2, tokens, width)).astype(np.float32)}
    for parts, own in (("", tokens_alone), ("bias layer_norm rotary", tokens_alone | more)):
        file = one_node("TokenBranch", [("x", floats)], floats, own, **attributes, parts=parts)
        found, wanted = core.compile_model(core.read_model(file), "CPU", EXACT)([x])[0], token_branch(x, own)
        noise = np.square(found - wanted).sum() / np.square(wanted - x).sum()
        if not noise < 1e-4:
            raise SystemExit(f"the branch with attention among all tokens is {noise:.1e} of its energy off: {parts}")

    attributes |= {"heads": HEADS}
    del constants["places"], constants["regions"]
    maps = random.standard_normal((3, SIDE - 2, WINDOWS * SIDE, width)).astype(np.float32)
    attributes |= {"window": [SIDE, SIDE], "shift": [0, 0], "pad_first": 0}
    file = one_node("MapBranch", [("x", floats)], floats, constants, **attributes)
    found, wanted = core.compile_model(core.read_model(file), "CPU", EXACT)([maps])[0], map_branch(maps, constants)
    noise = np.square(found - wanted).sum() / np.square(wanted - maps).sum()
    if not noise < 1e-4:
        raise SystemExit(f"the branch with attention on maps is {noise:.1e} of its energy off")

    constants = {name: random.standard_normal(4 * width).astype(np.float32) for name in ("gain", "bias")}
    constants |= {"scale": np.float32(0.03), "zero": np.int8(0)} | linear(random, 1, 4 * width, 2 * width)
    constants |= {"places": random.permutation(tokens).astype(np.int32)}
    file = one_node("PatchMerging", [("x", floats)], floats, constants, norm_last=0, epsilon=EPSILON)
    found, wanted = core.compile_model(core.read_model(file), "CPU", EXACT)([x])[0], patch_merging(x, constants)
    noise = np.square(found - wanted).sum() / np.square(wanted).sum()
    if not noise < 1e-6:  # levels differ where a value lies between two
        raise SystemExit(f"patch merging is {noise:.1e} of its energy off")

    constants = {"filters": random.standard_normal((WIDTH, 3, 4, 4)).astype(np.float32)}
    constants |= {name: random.standard_normal(WIDTH).astype(np.float32) for name in ("offsets", "gain", "bias")}
    constants |= {"places": random.permutation(35).astype(np.int32)}
    images = random.standard_normal((3, 3, 20, 28)).astype(np.float32)
    file = one_node("PatchEmbedding", [("x", floats)], floats, constants, epsilon=EPSILON)
    found, wanted = (
        core.compile_model(core.read_model(file), "CPU", EXACT)([images])[0],
        patch_embedding(images, constants),
    )
    noise = np.square(found - wanted).sum() / np.square(wanted).sum()
    if not noise < 1e-10:
        raise SystemExit(f"patch embedding is {noise:.1e} of its energy off")


def linear(random: np.random.Generator, number: int, inputs: int, outputs: int) -> dict:
    """The constants of a linear."""
    return {
        f"w{number}": random.integers(-127, 128, (inputs, outputs), np.int8),
        f"scales{number}": random.uniform(0.5e-3, 1e-3, outputs).astype(np.float32),
        f"b{number}": random.standard_normal(outputs).astype(np.float32),
    }


if __name__ == "__main__":
    main()
