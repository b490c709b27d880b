"""Checks of an ONNX file: operators, tensors, scales, shapes. Errors name the node or tensor; the caller adds the file.

Nothing is loaded from outside the file's folder. No memory is allocated for sizes that the file only declares: a tensor
must be as large as its data, and shape inference bounds the tensors that the graph computes.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from swin_quant.backends.onnx_reader.worker import ask
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.data.pictures import printable

OPSETS = range(17, 22)  # LayerNormalization came with 17; INT4 weights need 21, whose other Q/DQ engines may refuse
MAX_ELEMENTS = 2**30  # in one tensor, for one picture; Swin V2-L at 384 pixels needs 2**25
STANDARD = ("", "ai.onnx")
_MOST_DIMENSIONS = 32
_KEPT_BYTES = 1 << 18  # in each tensor that shape inference gets: shapes and scales are smaller
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_WHERE = re.compile(r"^\[ONNXRuntimeError\] .*? failed:(/.*:\d+ .*\) )?")  # its place in ONNX Runtime's sources
# OpenVINO's first lines, before the reason
_SAYING_NOTHING = re.compile(r"Exception from |Model wasn't fully converted|Node \S+ of type \w+$")


def graphs(*outermost: Any) -> Iterator[Any]:
    """Each graph or function, then the graphs nested in its nodes: outer ones come before inner ones."""
    pending = list(outermost)
    for graph in pending:  # it grows
        yield graph
        for node in graph.node:
            for attribute in node.attribute:  # whatever type it declares: engines differ in what they read
                pending += [*attribute.graphs, attribute.g] if attribute.HasField("g") else attribute.graphs


def nodes(*outermost: Any) -> Iterator[Any]:
    """The nodes of each graph or function, and of each graph nested in it."""
    return (node for graph in graphs(*outermost) for node in graph.node)


def check_operators(model: Any) -> int:
    """The opset of the standard operators. SwinQuantError for a node that is no such operator and no own function."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset: int | None = next((opsets[domain] for domain in STANDARD if domain in opsets), None)
    if opset is None or opset not in OPSETS:
        raise SwinQuantError(f"is of opset {opset}: must be {OPSETS[0]} to {OPSETS[-1]}: export it again")
    own = {(function.domain, function.name) for function in model.functions}
    if hidden := [name for domain, name in own if domain in STANDARD]:
        raise SwinQuantError(f"has functions of its own ({shown(min(hidden))}) in ONNX's domain: rename them")
    for node in nodes(model.graph, *model.functions):
        if node.domain not in STANDARD and (node.domain, node.op_type) not in own:
            why = "not an operator of ONNX, and no function of the file says what it computes"
            raise SwinQuantError(f"node {label(node)} is {shown(node.domain)}.{shown(node.op_type)}: {why}")
    return opset


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor that the file holds: initializers and attributes."""
    for graph in graphs(model.graph, *model.functions):
        held = [attribute for node in graph.node for attribute in node.attribute]
        sparse = getattr(graph, "sparse_initializer", ())
        if sparse or any(one.HasField("sparse_tensor") or one.sparse_tensors for one in held):
            raise SwinQuantError("has sparse tensors, which no engine here reads")
        yield from getattr(graph, "initializer", ())
        for one in held:
            yield from (*one.tensors, one.t) if one.HasField("t") else one.tensors


def external_parts(model: Any, folder: Path) -> tuple[Path, ...]:
    """The files in `folder` that hold external data.

    SwinQuantError for a tensor whose data is missing, or not as large as its shape.
    """
    from onnx import TensorProto, helper

    parts = []
    for tensor in tensors(model):
        name = shown(tensor.name) or "(unnamed)"
        if len(tensor.dims) > _MOST_DIMENSIONS or any(size < 0 for size in tensor.dims):
            raise SwinQuantError(f"tensor {name} has a negative size, or more than {_MOST_DIMENSIONS} dimensions")
        packed = 2 if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4) else 1
        units = -(-math.prod(tensor.dims) // packed)  # stored numbers: a byte holds two of INT4
        try:
            expected = units * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise SwinQuantError(f"tensor {name} is of no known type") from error
        if tensor.data_location == TensorProto.EXTERNAL:
            parts.append(_find_external(tensor, name, expected, folder))
            continue
        typed = max(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
        if len(tensor.raw_data) != expected if tensor.HasField("raw_data") else typed != units:
            raise SwinQuantError(f"tensor {name} declares {listed(map(str, tensor.dims), 8)}, and does not hold that")
    return tuple(dict.fromkeys(parts))


def _find_external(tensor: Any, name: str, expected: int, folder: Path) -> Path:
    entries, home = {entry.key: entry.value for entry in tensor.external_data}, Path(os.path.realpath(folder))
    location = entries.get("location", "")
    part = Path(os.path.realpath(home / location)) if location.isprintable() else home
    where = f"tensor {name} is in {shown(location)!r}"
    if part.parent != home or "\\" in location or Path(location).is_absolute():
        raise SwinQuantError(f"{where}: external data must be a file of the same folder")
    if not part.is_file() or part.stat().st_nlink > 1:
        raise SwinQuantError(f"{where}, which is missing, or a hard link: copy the file")
    offset, length = entries.get("offset", "0"), entries.get("length", str(expected))
    if not offset.isdecimal() or length != str(expected) or int(offset) + expected > part.stat().st_size:
        raise SwinQuantError(f"tensor {name}: {shown(location)} does not hold the {expected} bytes it declares")
    return part


def check_scales(graph: Any, folder: Path) -> None:
    """SwinQuantError unless every Q/DQ node, also inside If, Loop and Scan, has a constant, finite, positive scale.

    Where several graphs have a tensor of one name, all of these must be. `graph` comes from `infer_shapes`: functions
    are inlined.
    """
    from onnx import numpy_helper

    made: dict[str, list[Any]] = defaultdict(list)
    for each in graphs(graph):
        for tensor in each.initializer:
            made[tensor.name].append(tensor)
        for node in each.node:
            if node.op_type == "Constant":
                made[node.output[0]] += [one.t for one in node.attribute if one.name == "value"]

    @cache  # many nodes may share a scale
    def find_fault(scale: str) -> str | None:
        if not made.get(scale):
            return "is missing, or computed: it must be a constant; export it again"
        try:
            found = [numpy_helper.to_array(one, base_dir=str(folder)).astype(np.float64) for one in made[scale]]
        except (AttributeError, KeyError, ValueError, TypeError):
            return "is not a number; export it again"
        fits = all(values.size and (np.isfinite(values) & (values > 0)).all() for values in found)
        return None if fits else "must be finite and above zero; calibrate again"

    for node in nodes(graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = node.input[1] if len(node.input) > 1 else ""
            if fault := find_fault(scale):
                raise SwinQuantError(f"node {label(node)} ({node.op_type}): its scale {shown(scale)!r} {fault}")


def infer_shapes(model: Any) -> Any:
    """The graph of `model` with functions inlined and the shape of every tensor, without the data of large tensors.

    SwinQuantError for a graph that contradicts itself or has a tensor of more than MAX_ELEMENTS.
    """
    copy = type(model)()
    copy.CopyFrom(model)
    for tensor in tensors(copy):
        if tensor.ByteSize() > _KEPT_BYTES:
            for field in ("raw_data", *_TYPED_FIELDS):
                tensor.ClearField(field)
    try:
        graph = type(model).FromString(ask(copy.SerializeToString())).graph
    except ValueError as error:
        raise SwinQuantError(f"its graph makes no sense: {first_line(error)}") from error
    for value in (value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output)):
        elements = math.prod(max(size.dim_value, 1) for size in value.type.tensor_type.shape.dim)  # an open size is 1
        if elements > MAX_ELEMENTS:
            raise SwinQuantError(f"tensor {shown(value.name)} would have {float(elements):.3g} elements: too many")
    return graph


def label(node: Any) -> str:
    """The name of a node, else of its first output, fit to print."""
    return shown(node.name or next(iter(node.output), "") or node.op_type, 160)


def shown(text: str, most: int = 80) -> str:
    """Text from a file, fit for one line: without control characters, cut to `most` characters."""
    return printable(text[:most])


def first_line(error: Exception) -> str:
    """The first line of a library's message that gives the reason, not a place in the library or a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not _SAYING_NOTHING.match(line) and not line.endswith(":")] or lines
    return shown(_WHERE.sub("", said[0]) if said else type(error).__name__, 200)
