"""The checks of an ONNX file: operators, tensors, scales, shapes. Errors name the node or tensor, the caller the file.

Nothing is loaded from outside the file's folder, and nothing allocated for what the file only declares: a tensor must
be as large as its data, and whatever the graph computes is bounded through shape inference.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from swin_quant.backends.onnx_worker import InferenceError, infer
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.data.pictures import printable

OPSETS = range(17, 22)  # LayerNormalization is from 17; weights of INT4 need 21, whose other Q/DQ engines may not load
MAX_ELEMENTS = 2**30  # of anything that the graph computes for one picture; Swin V2-L at 384 pixels needs 2**25
_SCALED = ("QuantizeLinear", "DequantizeLinear")
_STANDARD = ("", "ai.onnx")
_MOST_INLINED = 10**5  # nodes: Swin-L has 44 rolls, of 20 nodes each
_SHAPE_BYTES = 4096  # tensors that shape inference may want to read are smaller
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_SAYING_NOTHING = ("Exception from ", "Model wasn't fully converted")  # OpenVINO's: the reason comes later


def check_operators(model: Any) -> int:
    """The opset of the standard operators; all nodes must be of those, or of functions of the model's own."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset: int | None = next((opsets[domain] for domain in _STANDARD if domain in opsets), None)
    if opset is None or opset not in OPSETS:
        raise SwinQuantError(f"is of opset {opset}: must be {OPSETS[0]} to {OPSETS[-1]}; export it again with ‹opset›")
    own = _functions(model)
    for graph in _graphs(model.graph):
        for node in graph.node:
            if node.domain not in _STANDARD and (node.domain, node.op_type) not in own:
                raise SwinQuantError(
                    f"node {label(node)} is {shown(node.domain)}.{shown(node.op_type)}: not an operator of ONNX, "
                    "and no function of the file says what it computes"
                )
    return opset


def _functions(model: Any) -> set[tuple[str, str]]:
    """Domain and name of the model's own functions, which may be of standard operators alone, and not too many."""
    calls = Counter((node.domain, node.op_type) for graph in _graphs(model.graph) for node in graph.node)
    nodes = 0
    for function in model.functions:
        inner = [node for graph in _graphs(function) for node in graph.node]
        for node in inner:
            if node.domain not in _STANDARD or node.op_type in _SCALED:
                raise SwinQuantError(
                    f"has functions of its own ({shown(function.name)}) of other than standard float operators "
                    f"({shown(node.op_type)}): export it without them"
                )
        if function.domain in _STANDARD:
            raise SwinQuantError(f"has functions of its own ({shown(function.name)}) in ONNX's domain: rename them")
        nodes += len(inner) * calls[function.domain, function.name]
    if nodes > _MOST_INLINED:
        raise SwinQuantError(f"its own functions stand for {nodes} nodes: no Swin has so many")
    return {(function.domain, function.name) for function in model.functions}


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph, or a function of the model's own, and the graphs inside its If and Loop nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():  # GRAPH, GRAPHS
                yield from _graphs(inner)


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor that the file holds: initializers and attributes."""
    for graph in (inner for outer in (model.graph, *model.functions) for inner in _graphs(outer)):
        if getattr(graph, "sparse_initializer", None):
            raise SwinQuantError("has sparse tensors, which no engine here reads")
        yield from getattr(graph, "initializer", ())
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                    raise SwinQuantError("has sparse tensors, which no engine here reads")
                yield from attribute.tensors
                if attribute.HasField("t"):
                    yield attribute.t


def external_parts(model: Any, folder: Path) -> tuple[Path, ...]:
    """Check every tensor of `model`; returns the files in `folder` that hold the data of some."""
    parts = (_check_tensor(tensor, folder) for tensor in tensors(model))
    return tuple(dict.fromkeys(part for part in parts if part))


def _check_tensor(tensor: Any, folder: Path) -> Path | None:
    """Raise unless a tensor's data is there and as large as its shape; return the file it is in, if another."""
    onnx = library("onnx", "onnx")
    name = shown(tensor.name) or "(unnamed)"
    if any(size < 0 for size in tensor.dims):
        raise SwinQuantError(f"tensor {name} has a negative size")
    elements = math.prod(tensor.dims)
    packed = 2 if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else 1
    units = -(-elements // packed)  # of a byte or more
    try:
        expected = units * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise SwinQuantError(f"tensor {name} is of no known type") from error
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, name, expected, folder)
    if tensor.HasField("raw_data"):
        held = len(tensor.raw_data)
    else:
        count = max(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
        held = expected if count == units else -1
    if held != expected:
        raise SwinQuantError(f"tensor {name} declares {listed(map(str, tensor.dims), 8)}, which is not what it holds")
    return None


def _external(tensor: Any, name: str, expected: int, folder: Path) -> Path:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    home = Path(os.path.realpath(folder))
    part = Path(os.path.realpath(home / location)) if location.isprintable() else home
    if part.parent != home or "\\" in location or Path(location).is_absolute():
        raise SwinQuantError(
            f"tensor {name} is in {shown(location)!r}: external data must be a file of the same folder"
        )
    if not os.path.isfile(part):
        raise SwinQuantError(f"tensor {name} is in {shown(location)!r}, which is missing")
    if part.stat().st_nlink > 1:
        raise SwinQuantError(
            f"tensor {name} is in {shown(location)!r}, which has a second name, perhaps in another folder: copy it"
        )
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError as error:
        raise SwinQuantError(f"tensor {name}: the place of its external data is not a number") from error
    if offset < 0 or length != expected or offset + length > part.stat().st_size:
        raise SwinQuantError(f"tensor {name}: {shown(location)} does not hold the {expected} bytes it declares")
    return part


def check_scales(graph: Any, folder: Path) -> None:
    """Every Q/DQ node needs a constant scale that is finite and positive; a Cast of one, as in float16, will do."""
    onnx = library("onnx", "onnx")
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer} | dict(_constants(graph))
    sources: dict[str, str] = {}  # of every name in a chain of casts, where it begins

    def source_of(name: str) -> str:
        chain: dict[str, None] = {}  # it may go in a circle
        while name not in chain and name not in constants and name not in sources and name in makers:
            if makers[name].op_type not in ("Cast", "Identity"):
                break
            chain[name] = None
            name = next(iter(makers[name].input), "")
        sources.update(dict.fromkeys(chain, sources.get(name, name)))
        return sources.get(name, name)

    @cache  # many nodes may share a large one
    def fault_of(source: str) -> str:
        try:
            values = onnx.numpy_helper.to_array(constants[source], base_dir=str(folder)).astype(np.float64)
        except (ValueError, TypeError):  # text
            return "is not a number; export it again"
        fits = values.size and (np.isfinite(values) & (values > 0)).all()
        return "" if fits else "must be finite and above zero; calibrate again"

    for node in graph.node:
        if node.op_type not in _SCALED:
            continue
        where = f"node {label(node)} ({node.op_type})"
        scale = node.input[1] if len(node.input) > 1 else ""
        source = source_of(scale)
        if source not in constants:
            fault = "is computed, not constant" if scale in makers else "is missing"
            raise SwinQuantError(f"{where} cannot be run: its scale {shown(scale)!r} {fault}; export it again")
        if fault := fault_of(source):
            raise SwinQuantError(f"{where}: its scale {shown(scale)!r} {fault}")


def _constants(graph: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor of every Constant node that holds a tensor."""
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and node.output:
                yield node.output[0], attribute.t


def without_data(model: Any) -> Any:
    """`model` itself, less the data of large tensors, which shape inference does not read."""
    for tensor in tensors(model):
        if tensor.ByteSize() > _SHAPE_BYTES:
            for field in ("raw_data", *_TYPED_FIELDS):
                tensor.ClearField(field)
    return model


def infer_shapes(model: Any) -> Any:
    """The graph with the shape of every tensor, none of them absurd. Drops the data of large tensors from `model`."""
    onnx = library("onnx", "onnx")
    try:
        bare = without_data(model).SerializeToString()
        graph = onnx.ModelProto.FromString(infer(bare, strict=True, inline=bool(model.functions))).graph
    except InferenceError as error:
        raise SwinQuantError(f"its graph makes no sense: {first_line(error)}") from error
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        elements = math.prod(max(size.dim_value, 1) for size in kind.shape.dim)  # an open size counts as one
        if elements > MAX_ELEMENTS:
            raise SwinQuantError(
                f"tensor {shown(value.name)} would have {float(elements):.3g} elements: no Swin has that"
            )
    return graph


def label(node: Any) -> str:
    """The name of a node, or of its first output where it has none, fit to print."""
    return shown(node.name or next(iter(node.output), "") or node.op_type, 160)


def shown(text: str, most: int = 80) -> str:
    """Text of a file, fit for one line: no control characters, at most so many others."""
    return printable(text[:most])


def first_line(error: Exception) -> str:
    """The first line of a library's message that says what it is about, and not where in the library it arose, or that
    more is to come: those end with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(_SAYING_NOTHING) and not line.endswith(":")] or lines
    return shown(said[0] if said else type(error).__name__, 200)
