"""Risks in half precision and INT8 that an ONNX file shows: in its weights, types and scales."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swin_quant.backends.onnx_reader.checks import graphs, label, nodes, shown
from swin_quant.backends.onnx_reader.file import GEMMS, read_model
from swin_quant.base.errors import listed
from swin_quant.base.extras import library
from swin_quant.quant.advice import Advice
from swin_quant.quant.calibration import LARGEST_HALF
from swin_quant.quant.outlier_channels import UNREACHED

_FLOATS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16 of TensorProto
_HALF = 10
_OF_HALF = (
    "LayerNormalization",
    "InstanceNormalization",
    "ReduceMean",
    "ReduceL2",
    "ReduceSumSquare",
    "Softmax",
    "Pow",
)


def by_file(path: Path) -> Iterator[Advice]:
    """The risks of the file at `path`."""
    model = read_model(path)
    held = {tensor.name: tensor for graph in graphs(model.graph) for tensor in graph.initializer}
    floats = {name: tensor for name, tensor in held.items() if tensor.data_type in _FLOATS}
    largest: dict[str, float] = {}
    broken, dead, wide = [], {}, {}
    outputs = {node.input[1]: _channels(node) for node in nodes(model.graph) if _multiplies(node)}
    for name, tensor in floats.items():
        values = _values(tensor, path)
        if not values.size:
            continue
        if not np.isfinite(values).all():
            broken.append(shown(name))
            continue
        largest[shown(name)] = float(np.abs(values).max())
        if name in outputs and values.ndim > 1:
            size = np.abs(np.moveaxis(values, outputs[name], 0).reshape(values.shape[outputs[name]], -1)).max(1)
            if gone := int((size == 0).sum()):
                dead[shown(name)] = gone
            if (middle := float(np.median(size))) > 0 and (times := float(size.max()) / middle) > UNREACHED:
                wide[shown(name)] = times
    if broken:
        yield Advice(
            "not-finite", f"{len(broken)} tensors hold NaN or infinity: {listed(broken, 2)}", tuple(broken), True
        )
    if over := [name for name, value in largest.items() if value > LARGEST_HALF]:
        text = f"{len(over)} tensors exceed the largest float16: {listed(over, 2)}"
        yield Advice("weights-beyond-half", text, tuple(over), True)
    if dead:
        text = f"dead output channels (weights of 0) in {len(dead)} products: {_most(dead)}"
        yield Advice("dead-channels", text, tuple(dead))
    if wide:
        text = f"output channels of {len(wide)} weights stand out, {_most(wide)} times the median"
        yield Advice("outlier-weights", f"{text}: take a range for each channel, not one for the tensor", tuple(wide))
    yield from _of_types(model, {name for name, tensor in floats.items() if tensor.data_type == _HALF})
    yield from _of_scales(model, held)


def _of_types(model: Any, half: set[str]) -> Iterator[Advice]:
    """Operators that sum or square in float16; types are followed from casts, weights and pictures."""
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == _HALF:
            half.add(value.name)
    risky = []
    for node in nodes(model.graph):
        to = next((one.i for one in node.attribute if node.op_type == "Cast" and one.name == "to"), None)
        if to == _HALF or (to is None and any(name in half for name in node.input[:1])):
            half.update(node.output)
            if node.op_type in _OF_HALF and to is None:
                risky.append(label(node))
    if risky:
        text = f"{len(risky)} norms, sums and softmaxes compute in float16, whose squares overflow beyond 256"
        yield Advice("norm-variance", f"{text}: {listed(risky, 2)}", tuple(risky), True)


def _of_scales(model: Any, held: Mapping[str, Any]) -> Iterator[Advice]:
    """Weights that are quantized with one scale for all channels."""
    whole = [
        label(node)
        for node in nodes(model.graph)
        if node.op_type == "DequantizeLinear" and len(node.input) > 1 and node.input[1] in held
        if not held[node.input[1]].dims and node.input[0] in held and len(held[node.input[0]].dims) > 1
    ]
    if whole:
        text = f"{len(whole)} weights have one scale for the whole tensor: {listed(whole, 2)}"
        yield Advice("tensor-scales", f"{text}; one for each output channel costs engines nothing", tuple(whole))


def _multiplies(node: Any) -> bool:
    return node.op_type in GEMMS and len(node.input) > 1


def _channels(node: Any) -> int:
    """The dimension of a weight's output channels."""
    turned = any(one.name == "transB" and one.i for one in node.attribute)
    return 0 if node.op_type == "Conv" or turned else -1


def _values(tensor: Any, path: Path) -> Any:
    onnx = library("onnx", "onnx")
    return onnx.numpy_helper.to_array(tensor, base_dir=str(path.parent)).astype(np.float32, copy=False)


def _most(found: Mapping[str, float]) -> str:
    name = max(found, key=found.__getitem__)
    return f"{name} most, {found[name]:.4g}"
