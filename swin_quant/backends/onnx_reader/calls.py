"""Counts the operators of an ONNX graph for `analyze`, by ONNX's shape inference for a given batch. Nothing runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_quant.backends.onnx_reader.checks import STANDARD, check_operators, graphs, infer_shapes, label, nodes, shown
from swin_quant.backends.onnx_reader.file import naming, read_model
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.reading import reads
from swin_quant.operators.trace import Call, Shape

_DEPENDING = ("If", "Loop", "Scan", "NonZero", "Unique", "NonMaxSuppression", "Compress")
_NO_PARAMETERS = (7, 8, 9)  # TensorProto's INT64, STRING, BOOL: shapes and indices


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
            why = "takes pictures of any size, whose operators cannot be counted"
            raise UsageError(f"{why}: export it with a fixed one")
        parameters = sum(math.prod(one.dims) for one in held.values() if one.data_type not in _NO_PARAMETERS)
        for graph in graphs(model.graph):
            del graph.value_info[:]  # its shapes may be of another batch
        graph = infer_shapes(model)
    values = [value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output)]
    shapes = {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}
    shapes |= {name: tuple(tensor.dims) for name, tensor in held.items()}
    calls, depending = [], []
    for node in nodes(graph):
        if node.op_type in _DEPENDING:
            depending.append(f"{node.op_type} ({label(node)})")
        if node.op_type != "Constant":
            name = node.op_type if node.domain in STANDARD else f"{shown(node.domain)}::{shown(node.op_type)}"
            read, made = ([shapes.get(one) for one in names] for names in (node.input, node.output))
            known_read, known_made = (tuple(one for one in several if one is not None) for several in (read, made))
            calls.append(Call(name, label(node), known_read, known_made, _count_macs(node, read, made)))
    return CountedGraph(tuple(calls), parameters, open_batch, shapes[inputs[0].name], tuple(depending))


def _count_macs(node: Any, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    """Multiply-adds of a node; 0 for a node that multiplies no matrices, and for unknown shapes."""
    kind, out, first = node.op_type, (*outputs, None)[0], (*inputs, None)[0]
    if out is None or not first:
        return 0
    if kind in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"):
        turned = any(one.name == "transA" and one.i for one in node.attribute)
        return math.prod(out) * (first[0] if turned else first[-1])
    place = 3 if kind == "QLinearConv" else 1
    weight = inputs[place] if len(inputs) > place else None
    if not weight or not weight[0] or kind not in ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
        return 0
    return math.prod(first if kind == "ConvTranspose" else out) * math.prod(weight[1:])
