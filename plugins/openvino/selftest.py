"""Checks a library of the operators: selftest.py LIBRARY ends with an error unless it computes attention as numpy does.

A program of its own: a library that crashes takes nothing else with it.
"""

import sys

import numpy as np
import onnx
import openvino

HEADS, DEPTH, LENGTH, WINDOWS = 2, 32, 49, 4
SCALES = [0.02, 0.03, 0.02, 0.004]  # of q, k, v and the result


def one_node() -> bytes:
    """An ONNX file: x int8 [B, T, 3C] and c float32 [nW * heads, L, L] -> y int8 [B, T, C]."""
    node = onnx.helper.make_node("Attention", ["x", "c"], ["y"], domain="swin_quant", heads=HEADS, scales=SCALES)
    kinds = {"x": onnx.TensorProto.INT8, "c": onnx.TensorProto.FLOAT, "y": onnx.TensorProto.INT8}
    x, c, y = (onnx.helper.make_tensor_value_info(name, kind, ["a", "b", name]) for name, kind in kinds.items())
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("swin_quant", 1)]
    graph = onnx.helper.make_graph([node], "one", [x, c], [y])
    return onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString()


def attention(x: np.ndarray, constant: np.ndarray) -> np.ndarray:
    """The levels of the result, not rounded."""
    parts = x.astype(np.float64).reshape(-1, WINDOWS, LENGTH, 3, HEADS, DEPTH).transpose(3, 0, 1, 4, 2, 5)
    q, k, v = (part * scale for part, scale in zip(parts, SCALES, strict=False))
    logits = q @ k.swapaxes(-2, -1) + constant.reshape(WINDOWS, HEADS, LENGTH, LENGTH)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    result = shares / shares.sum(-1, keepdims=True) @ v / SCALES[-1]
    return np.clip(result.swapaxes(2, 3).reshape(len(x), -1, HEADS * DEPTH), -128, 127)


def main() -> None:
    core = openvino.Core()
    core.add_extension(sys.argv[1])
    model = core.compile_model(core.read_model(one_node()), "CPU")
    random = np.random.default_rng(0)
    x = random.integers(-128, 128, (2, WINDOWS * LENGTH, 3 * HEADS * DEPTH), np.int8)
    constant = random.standard_normal((WINDOWS * HEADS, LENGTH, LENGTH)).astype(np.float32)
    off = np.abs(model([x, constant])[0] - attention(x, constant))
    if off.max() > 4 or off.mean() > 0.5:  # levels: exponentials are rounded to 8 bits; rounding alone costs 0.25
        raise SystemExit(f"attention is {off.mean():.2f} levels off, {off.max():.1f} at most")


if __name__ == "__main__":
    main()
