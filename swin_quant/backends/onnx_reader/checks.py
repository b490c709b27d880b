"""Checks of an ONNX file: operators, tensors, scales, shapes. Errors name the node or tensor; the caller adds the file.

Nothing is loaded from outside the file's folder. No memory is allocated for sizes that the file only declares: a tensor
must be as large as its data, and shape inference bounds the tensors that the graph computes.
"""

import math
import os
import re
from collections import ChainMap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swin_quant.backends.onnx_reader.worker import InferenceError, ask
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.data.pictures import printable

OPSETS = range(17, 22)  # LayerNormalization came with 17; INT4 weights need 21, whose other Q/DQ engines may refuse
MAX_ELEMENTS = 2**30  # in one tensor, for one picture; Swin V2-L at 384 pixels needs 2**25
STANDARD = ("", "ai.onnx")
_SCALED = ("QuantizeLinear", "DequantizeLinear")
_MOST_DIMENSIONS = 32
_MOST_CASTS = 8  # one behind the other, of one scale
_KEPT_BYTES = 1 << 18  # in each tensor that shape inference gets: shapes and scales are smaller
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_WHERE = re.compile(r"^\[ONNXRuntimeError\] .*? failed:(/.*:\d+ .*\) )?")  # its place in ONNX Runtime's sources
# OpenVINO's first lines, before the reason
_SAYING_NOTHING = re.compile(r"Exception from |Model wasn't fully converted|Node \S+ of type \w+$")


def scopes(*outermost: Any) -> Iterator[tuple[Any, ...]]:
    """Each graph, or function of the model, and each graph nested in it, as the tuple (outermost graph, ..., graph).

    A graph may use the tensors of all that enclose it. Outer graphs come before the ones nested in them.
    """
    pending: list[tuple[Any, ...]] = [(graph,) for graph in outermost]
    for scope in pending:  # it grows
        yield scope
        for node in scope[-1].node:
            for attribute in node.attribute:  # whatever type it declares: engines differ in what they read
                pending += [(*scope, inner) for inner in attribute.graphs]
                pending += [(*scope, attribute.g)] if attribute.HasField("g") else []


def graphs(*outermost: Any) -> Iterator[Any]:
    """Each graph or function, and each graph nested in it."""
    return (scope[-1] for scope in scopes(*outermost))


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
            raise SwinQuantError(
                f"node {label(node)} is {shown(node.domain)}.{shown(node.op_type)}: not an operator of ONNX, "
                "and no function of the file says what it computes"
            )
    return opset


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor that the file holds: initializers and attributes."""
    for graph in graphs(model.graph, *model.functions):
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        if getattr(graph, "sparse_initializer", None) or any(
            one.HasField("sparse_tensor") or one.sparse_tensors for one in attributes
        ):
            raise SwinQuantError("has sparse tensors, which no engine here reads")
        yield from getattr(graph, "initializer", ())
        for one in attributes:
            yield from (*one.tensors, one.t) if one.HasField("t") else one.tensors


def external_parts(model: Any, folder: Path) -> tuple[Path, ...]:
    """Check every tensor of `model`; returns the files in `folder` that hold external data."""
    parts = (_check_tensor(tensor, folder) for tensor in tensors(model))
    return tuple(dict.fromkeys(part for part in parts if part))


def _check_tensor(tensor: Any, folder: Path) -> Path | None:
    """SwinQuantError unless a tensor's data is there and as large as its shape; returns the file of external data."""
    onnx = library("onnx", "onnx")
    name = shown(tensor.name) or "(unnamed)"
    if any(size < 0 for size in tensor.dims):
        raise SwinQuantError(f"tensor {name} has a negative size")
    if len(tensor.dims) > _MOST_DIMENSIONS:
        raise SwinQuantError(f"tensor {name} has {len(tensor.dims)} dimensions: no engine has so many")
    packed = 2 if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else 1
    units = -(-math.prod(tensor.dims) // packed)  # stored numbers: a byte holds two of INT4
    try:
        expected = units * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise SwinQuantError(f"tensor {name} is of no known type") from error
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, name, expected, folder)
    if tensor.HasField("raw_data"):
        fits = len(tensor.raw_data) == expected
    else:
        fits = max(len(getattr(tensor, field)) for field in _TYPED_FIELDS) == units
    if not fits:
        raise SwinQuantError(f"tensor {name} declares {listed(map(str, tensor.dims), 8)}, which is not what it holds")
    return None


def _external(tensor: Any, name: str, expected: int, folder: Path) -> Path:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    home = Path(os.path.realpath(folder))
    part = Path(os.path.realpath(home / location)) if location.isprintable() else home
    where = f"tensor {name} is in {shown(location)!r}"
    if part.parent != home or "\\" in location or Path(location).is_absolute():
        raise SwinQuantError(f"{where}: external data must be a file of the same folder")
    if not os.path.isfile(part):
        raise SwinQuantError(f"{where}, which is missing")
    if part.stat().st_nlink > 1:
        raise SwinQuantError(f"{where}, which has a second name, perhaps in another folder: copy it")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError as error:
        raise SwinQuantError(f"tensor {name}: the place of its external data is not a number") from error
    if offset < 0 or length != expected or offset + length > part.stat().st_size:
        raise SwinQuantError(f"tensor {name}: {shown(location)} does not hold the {expected} bytes it declares")
    return part


def check_scales(graph: Any, folder: Path) -> None:
    """SwinQuantError unless every Q/DQ node, also inside If, Loop and Scan, has a constant, finite, positive scale.

    The scale may pass through Casts, as in float16, if it is still finite and positive behind them. `graph` comes from
    `infer_shapes`: functions are inlined, and every tensor follows the ones that it is made of.
    """
    known: dict[int, ChainMap[str, tuple[Any, tuple[int, ...]] | None]] = {}
    extremes: dict[int, Any] = {}  # many nodes may share a tensor
    for scope in scopes(graph):
        # Name -> its constant and the types that it is cast to, or None for a value that is computed
        names = known[id(scope[-1])] = known[id(scope[-2])].new_child() if len(scope) > 1 else ChainMap()
        names.update({value.name: None for value in scope[-1].input})
        names.update({tensor.name: (tensor, ()) for tensor in scope[-1].initializer})
        for node in scope[-1].node:
            names.update(dict.fromkeys(node.output))
            source = names.get(next(iter(node.input), ""))
            if node.op_type == "Constant":
                values = [one.t for one in node.attribute if one.name == "value"]
                names.update({name: (value, ()) for name in node.output for value in values})
            elif node.op_type in ("Cast", "Identity") and source and len(source[1]) < _MOST_CASTS:
                to = tuple(one.i for one in node.attribute if one.name == "to" and (one.i,) != source[1][-1:])
                names[node.output[0]] = source[0], source[1] + to
            elif node.op_type in _SCALED:
                _check_scale(node, names, folder, extremes)


def _check_scale(node: Any, names: ChainMap[str, Any], folder: Path, extremes: dict[int, Any]) -> None:
    scale = node.input[1] if len(node.input) > 1 else ""
    where = f"node {label(node)} ({node.op_type})"
    found = names.get(scale)
    if found is None:
        fault = "is computed, not constant" if scale in names else "is missing"
        raise SwinQuantError(f"{where} cannot be run: its scale {shown(scale)!r} {fault}; export it again")
    tensor, casts = found
    if id(tensor) not in extremes:
        extremes[id(tensor)] = _extremes(tensor, folder)
    if fault := _find_scale_fault(extremes[id(tensor)], casts):
        raise SwinQuantError(f"{where}: its scale {shown(scale)!r} {fault}")


def _extremes(tensor: Any, folder: Path) -> Any:
    """The least and the largest value, in the tensor's type; None for text and for more than a network's channels."""
    onnx = library("onnx", "onnx")
    try:
        values = onnx.numpy_helper.to_array(tensor, base_dir=str(folder))
        return np.array([values.min(), values.max()]) if values.size else values
    except (ValueError, TypeError):
        return None


def _find_scale_fault(values: Any, casts: Sequence[int]) -> str:
    onnx = library("onnx", "onnx")
    try:
        with np.errstate(all="ignore"):
            for kind in casts:
                values = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
            values = values.astype(np.float64)
    except (AttributeError, ValueError, TypeError, KeyError):
        return "is not a number; export it again"
    fits = values.size and (np.isfinite(values) & (values > 0)).all()
    return "" if fits else "must be finite and above zero; calibrate again"


def without_data(model: Any) -> Any:
    """`model` itself, without the data of large tensors, which shape inference does not read."""
    for tensor in tensors(model):
        if tensor.ByteSize() > _KEPT_BYTES:
            for field in ("raw_data", *_TYPED_FIELDS):
                tensor.ClearField(field)
    return model


def infer_shapes(model: Any) -> Any:
    """The graph with functions inlined and the shape of every tensor. Drops the data of large tensors from `model`.

    SwinQuantError for a graph that contradicts itself or has a tensor of more than MAX_ELEMENTS.
    """
    onnx = library("onnx", "onnx")
    try:
        graph = onnx.ModelProto.FromString(ask(without_data(model).SerializeToString(), "strict")).graph
    except InferenceError as error:
        raise SwinQuantError(f"its graph makes no sense: {first_line(error)}") from error
    for value in (value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output)):
        elements = math.prod(max(size.dim_value, 1) for size in value.type.tensor_type.shape.dim)  # an open size is 1
        if elements > MAX_ELEMENTS:
            raise SwinQuantError(
                f"tensor {shown(value.name)} would have {float(elements):.3g} elements: no Swin has that"
            )
    return graph


def label(node: Any) -> str:
    """The name of a node, else of its first output, fit to print."""
    return shown(node.name or next(iter(node.output), "") or node.op_type, 160)


def shown(text: str, most: int = 80) -> str:
    """Text from a file, fit for one line: without control characters, cut to `most` characters."""
    return printable(text[:most])


def first_line(error: Exception) -> str:
    """The first line of a library's message that gives the reason.

    Lines that name a place in the library, or end with a colon because more follows, are skipped.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not _SAYING_NOTHING.match(line) and not line.endswith(":")] or lines
    return shown(_WHERE.sub("", said[0]) if said else type(error).__name__, 200)
