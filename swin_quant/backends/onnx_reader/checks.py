"""Checks of an ONNX file: operators, tensors, scales, shapes. Errors name the node or tensor; the caller adds the file.

Nothing is loaded from outside the file's folder. No memory is allocated for sizes that the file only declares: a tensor
must be as large as its data, and shape inference bounds the tensors that the graph computes.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from swin_quant.backends.onnx_reader.worker import InferenceError, infer
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.data.pictures import printable

OPSETS = range(17, 22)  # LayerNormalization came with 17; INT4 weights need 21, whose other Q/DQ engines may refuse
MAX_ELEMENTS = 2**30  # in one tensor, for one picture; Swin V2-L at 384 pixels needs 2**25
_SCALED = ("QuantizeLinear", "DequantizeLinear")
_Constant: TypeAlias = tuple[Any, tuple[int, ...]]
_STANDARD = ("", "ai.onnx")
_MOST_DIMENSIONS = 32
_MOST_CASTS = 8  # one behind the other, of one scale
_MOST_INLINED = 10**5  # nodes: Swin-L has 44 rolls, of 20 nodes each
_SHAPE_BYTES = 4096  # shape inference reads only tensors smaller than this
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
    opset: int | None = next((opsets[domain] for domain in _STANDARD if domain in opsets), None)
    if opset is None or opset not in OPSETS:
        raise SwinQuantError(f"is of opset {opset}: must be {OPSETS[0]} to {OPSETS[-1]}: export it again")
    own = _functions(model)
    for node in nodes(model.graph):
        if node.domain not in _STANDARD and (node.domain, node.op_type) not in own:
            raise SwinQuantError(
                f"node {label(node)} is {shown(node.domain)}.{shown(node.op_type)}: not an operator of ONNX, "
                "and no function of the file says what it computes"
            )
    return opset


def _functions(model: Any) -> set[tuple[str, str]]:
    """Domain and name of each of the model's own functions. SwinQuantError for non-standard or too many operators."""
    calls = Counter((node.domain, node.op_type) for node in nodes(model.graph))
    total = 0
    for function in model.functions:
        inner = list(nodes(function))
        for node in inner:
            is_scaled = node.op_type in _SCALED and _scale_of(node) not in function.input
            if node.domain not in _STANDARD or is_scaled:
                raise SwinQuantError(
                    f"has a function of its own, {shown(function.name)}, with the node {shown(node.op_type)}: "
                    "a function may hold standard operators, and scales of the call: export it without"
                )
        if function.domain in _STANDARD:
            raise SwinQuantError(f"has functions of its own ({shown(function.name)}) in ONNX's domain: rename them")
        total += len(inner) * calls[function.domain, function.name]
    if total > _MOST_INLINED:
        raise SwinQuantError(f"its own functions stand for {total} nodes: no Swin has so many")
    return {(function.domain, function.name) for function in model.functions}


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor that the file holds: initializers and attributes."""
    for graph in graphs(model.graph, *model.functions):
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
    elements = math.prod(tensor.dims)
    packed = 2 if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else 1
    units = -(-elements // packed)  # stored numbers: a byte holds two of INT4
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


def _scale_of(node: Any) -> str:
    """The name of the scale of a Q/DQ node; empty if it is missing."""
    return node.input[1] if len(node.input) > 1 else ""


def check_scales(graph: Any, folder: Path, functions: Iterable[Any] = ()) -> None:
    """SwinQuantError unless every Q/DQ node, also inside If, Loop and Scan, has a constant, finite, positive scale.

    The scale may pass through Casts, as in float16, if it is still finite and positive behind them. Calls of
    `functions` give the scales of the nodes inside.
    """
    given = {
        (one.domain, one.name): {
            list(one.input).index(_scale_of(node)) for node in nodes(one) if node.op_type in _SCALED
        }
        for one in functions
    }
    every = list(scopes(graph))
    held = {id(scope[-1]): _names_in(scope[-1]) for scope in every}
    ends: dict[tuple[int, str], _Constant] = {}
    extremes: dict[int, Any] = {}  # many nodes may share a large tensor
    for scope in every:
        names = [held[id(one)] for one in reversed(scope)]
        for node in scope[-1].node:
            where = f"node {label(node)} ({node.op_type})"
            places = {1} if node.op_type in _SCALED else given.get((node.domain, node.op_type), set())
            for scale in (node.input[place] if place < len(node.input) else "" for place in sorted(places)):
                tensor, casts = _constant_behind(scale, names, ends)
                if tensor is None:
                    fault = "is computed, not constant" if _found(scale, names)[1] else "is missing"
                    raise SwinQuantError(f"{where} cannot be run: its scale {shown(scale)!r} {fault}; export it again")
                if id(tensor) not in extremes:
                    extremes[id(tensor)] = _extremes(tensor, folder)
                if fault := _fault_of_scale(extremes[id(tensor)], casts):
                    raise SwinQuantError(f"{where}: its scale {shown(scale)!r} {fault}")


def _names_in(graph: Any) -> dict[str, Any]:
    """Name -> its tensor, the node that computes it, or None for an input of the graph."""
    found = {value.name: None for value in graph.input} | {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        values = [one.t for one in node.attribute if node.op_type == "Constant" and one.name == "value"]
        found |= dict.fromkeys(node.output, next(iter(values), node))
    found.pop("", None)
    return found


def _found(name: str, names: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """The entry of `name` in the innermost of `names` that has it, and the names of that graph and its outer ones."""
    place = next((place for place, known in enumerate(names) if name in known), len(names))
    return (names[place][name] if place < len(names) else None), names[place:]


def _constant_behind(
    name: str, names: Sequence[Mapping[str, Any]], ends: dict[tuple[int, str], _Constant]
) -> _Constant:
    """The constant tensor behind a name, or None, and the types that it is cast to, the last one first.

    `ends` keeps the answer for every name on the way.
    """
    way: dict[tuple[int, str], int] = {}  # the names passed: a hostile graph may lead in a circle
    casts: list[int] = []
    while True:
        found, names = _found(name, names)
        key = (id(names[0]) if names else 0, name)
        moves = getattr(found, "op_type", None) in ("Cast", "Identity")
        if key in way or key in ends or not moves or len(casts) > _MOST_CASTS:
            break
        way[key] = len(casts)
        casts += [one.i for one in found.attribute if one.name == "to" and [one.i] != casts[-1:]]
        name = next(iter(found.input), "")
    tensor, before = ends.get(key, (None if hasattr(found, "op_type") else found, ()))
    casts += before[: _MOST_CASTS - len(casts)]
    ends |= {key: (tensor, tuple(casts[start:])) for key, start in way.items()}
    return tensor, tuple(casts)


def _extremes(tensor: Any, folder: Path) -> Any:
    """The least and the largest value, in the tensor's type; None for text, an empty array for no values."""
    onnx = library("onnx", "onnx")
    try:
        values = onnx.numpy_helper.to_array(tensor, base_dir=str(folder))
        return np.array([values.min(), values.max()]) if values.size else values
    except (ValueError, TypeError):
        return None


def _fault_of_scale(values: Any, casts: Sequence[int]) -> str:
    onnx = library("onnx", "onnx")
    try:
        with np.errstate(all="ignore"):
            for kind in reversed(casts):
                values = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
            values = values.astype(np.float64)
    except (AttributeError, ValueError, TypeError, KeyError):
        return "is not a number; export it again"
    fits = values.size and (np.isfinite(values) & (values > 0)).all()
    return "" if fits else "must be finite and above zero; calibrate again"


def without_data(model: Any) -> Any:
    """`model` itself, without the data of large tensors, which shape inference does not read."""
    for tensor in tensors(model):
        if tensor.ByteSize() > _SHAPE_BYTES:
            for field in ("raw_data", *_TYPED_FIELDS):
                tensor.ClearField(field)
    return model


def infer_shapes(model: Any) -> Any:
    """The graph with the shape of every tensor. Drops the data of large tensors from `model`.

    SwinQuantError for a graph that contradicts itself or has a tensor of more than MAX_ELEMENTS.
    """
    onnx = library("onnx", "onnx")
    try:
        bare = without_data(model).SerializeToString()
        graph = onnx.ModelProto.FromString(infer(bare, strict=True, inline=bool(model.functions))).graph
    except InferenceError as error:
        raise SwinQuantError(f"its graph makes no sense: {first_line(error)}") from error
    for value in (value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output)):
        kind = value.type.tensor_type
        elements = math.prod(max(size.dim_value, 1) for size in kind.shape.dim)  # an open size counts as one
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
