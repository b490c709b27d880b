"""Counts the operators of an ONNX graph for `analyze`, by ONNX's shape inference for a given batch. Nothing runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.onnx_reader.checks import check_operators, graphs, infer_shapes, label, nodes, shown
from swin_quant.backends.onnx_reader.file import naming, read_model
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.reading import reads
from swin_quant.operators.trace import Call, Shape

DEPENDING = frozenset({"If", "Loop", "Scan", "NonZero", "Unique", "NonMaxSuppression", "Compress"})
_MATRIX = frozenset({"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"})
_KERNEL = frozenset({"Conv", "ConvInteger", "QLinearConv"})
_INDEX_TYPES = (7, 8, 9)  # TensorProto's INT64, STRING, BOOL: shapes and indices, no parameters
_WEIGHT_OF = {"QLinearMatMul": 3, "QLinearConv": 3}


@dataclass(frozen=True)
class CountedGraph:
    """The counts of one graph.

    `calls`: in order. `parameters`: how many numbers its initializers hold. `open_batch`: it takes any batch. `images`:
    the shape of its input for the given batch. `depending`: nodes whose shape or control flow depends on data.
    """

    calls: tuple[Call, ...]
    parameters: int
    open_batch: bool
    images: Shape
    depending: tuple[str, ...]


@reads("ONNX file")
def counted(path: Path, batch: int) -> CountedGraph:
    """The graph of the file at `path` for `batch` pictures. SwinQuantError names the file and the fault.

    Functions are counted by the operators in them; bodies of If, Loop and Scan are counted once.
    """
    model = read_model(path)
    with naming(path):
        return _counted(model, batch)


def _counted(model: Any, batch: int) -> CountedGraph:
    check_operators(model)
    held = {tensor.name: tensor for graph in graphs(model.graph) for tensor in graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in held]
    if len(inputs) != 1:
        raise SwinQuantError(f"has {len(inputs)} inputs: a model of pictures has one")
    sizes = inputs[0].type.tensor_type.shape.dim
    open_batch = bool(sizes) and not sizes[0].HasField("dim_value")
    if not open_batch and sizes and sizes[0].dim_value != batch:
        raise UsageError(f"is for batches of {sizes[0].dim_value} alone: give that as ‹batch›")
    if open_batch:
        sizes[0].dim_value = batch
    if not sizes or any(not size.HasField("dim_value") for size in sizes):
        raise UsageError("takes pictures of any size, whose operators cannot be counted: export it with a fixed one")
    parameters = sum(math.prod(one.dims) for one in held.values() if one.data_type not in _INDEX_TYPES)
    for graph in graphs(model.graph):
        del graph.value_info[:]  # its shapes may be of another batch
    graph = infer_shapes(model)
    values = (value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output))
    shapes = {value.name: _shape(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}
    shapes |= {name: _shape(tensor.dims) for name, tensor in held.items()}
    calls = [_call(node, shapes) for node in nodes(graph) if node.op_type != "Constant"]
    depending = tuple(f"{node.op_type} ({label(node)})" for node in nodes(graph) if node.op_type in DEPENDING)
    images = shapes[inputs[0].name]
    return CountedGraph(tuple(calls), parameters, open_batch, images, depending)


def _call(node: Any, shapes: Mapping[str, Shape]) -> Call:
    """The shapes and MACs of one node."""
    name = node.op_type if node.domain in ("", "ai.onnx") else f"{shown(node.domain)}::{shown(node.op_type)}"
    return Call(
        name,
        label(node),
        tuple(shapes[one] for one in node.input if one in shapes),
        tuple(shapes[one] for one in node.output if one in shapes),
        count_macs(node, [shapes.get(one) for one in node.input], [shapes.get(one) for one in node.output]),
    )


def count_macs(node: Any, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    """Multiply-adds of a node; 0 for a node that multiplies no matrices, and for unknown shapes."""
    kind, out = node.op_type, outputs[0] if outputs else None
    first = inputs[0] if inputs else None
    if out is None or not first:
        return 0
    if kind in _MATRIX:
        turned = any(one.name == "transA" and one.i for one in node.attribute)
        return math.prod(out) * (first[0] if turned else first[-1])
    weight = inputs[_WEIGHT_OF.get(kind, 1)] if len(inputs) > _WEIGHT_OF.get(kind, 1) else None
    if weight is None or not weight or not weight[0]:
        return 0
    if kind in _KERNEL:
        return math.prod(out) * math.prod(weight[1:])
    return math.prod(first) * math.prod(weight[1:]) if kind == "ConvTranspose" else 0


def _shape(sizes: Any) -> Shape:
    return tuple(int(size) for size in sizes)
