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

from swin_quant.backends.onnx_reader.worker import InferenceError, ask
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.data.pictures import printable

OPSETS = range(17, 22)  # LayerNormalization came with 17; INT4 weights need 21, whose other Q/DQ engines may refuse
MAX_ELEMENTS = 2**30  # in one tensor, for one picture; Swin V2-L at 384 pixels needs 2**25
STANDARD = ("", "ai.onnx")
_MOST_DIMENSIONS = 32
_MOST_CASTS = 8  # one behind the other, of one scale
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
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        if getattr(graph, "sparse_initializer", None) or any(
            one.HasField("sparse_tensor") or one.sparse_tensors for one in attributes
        ):
            raise SwinQuantError("has sparse tensors, which no engine here reads")
        yield from getattr(graph, "initializer", ())
        for one in attributes:
            yield from (*one.tensors, one.t) if one.HasField("t") else one.tensors


def external_parts(model: Any, folder: Path) -> tuple[Path, ...]:
    """The files in `folder` that hold external data.

    SwinQuantError for a tensor whose data is missing, or not as large as its shape.
    """
    from onnx import TensorProto, helper

    parts = []
    for tensor in tensors(model):
        name = shown(tensor.name) or "(unnamed)"
        if any(size < 0 for size in tensor.dims):
            raise SwinQuantError(f"tensor {name} has a negative size")
        if len(tensor.dims) > _MOST_DIMENSIONS:
            raise SwinQuantError(f"tensor {name} has {len(tensor.dims)} dimensions: no engine has so many")
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
            sizes = listed(map(str, tensor.dims), 8)
            raise SwinQuantError(f"tensor {name} declares {sizes}, which is not what it holds")
    return tuple(dict.fromkeys(parts))


def _find_external(tensor: Any, name: str, expected: int, folder: Path) -> Path:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    home = Path(os.path.realpath(folder))
    part = Path(os.path.realpath(home / location)) if location.isprintable() else home
    where = f"tensor {name} is in {shown(location)!r}"
    if part.parent != home or "\\" in location or Path(location).is_absolute():
        raise SwinQuantError(f"{where}: external data must be a file of the same folder")
    if not part.is_file():
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

    The scale may pass through Casts, as in float16, if it is still finite and positive behind them. Where several
    graphs have a tensor of one name, all of these must be. `graph` comes from `infer_shapes`: functions are inlined.
    """
    from onnx import helper, numpy_helper

    made: dict[str, list[Any]] = defaultdict(list)  # name -> its constants, the nodes that make it, None for an input
    for each in graphs(graph):
        held = {tensor.name for tensor in each.initializer}
        for tensor in each.initializer:
            made[tensor.name].append(tensor)
        for name in {value.name for value in each.input} - held:
            made[name].append(None)
        for node in each.node:
            constants = [one.t for one in node.attribute if node.op_type == "Constant" and one.name == "value"]
            for name in node.output:
                made[name].append(constants[0] if constants else node)

    @cache  # many nodes may share a scale
    def find_extremes(name: str, casts: int = 0) -> Any:
        """The least and the largest value, in their type; None for what is computed."""
        found: list[Any] = []
        for source in made[name]:
            if hasattr(source, "raw_data"):
                values = numpy_helper.to_array(source, base_dir=str(folder))
            elif source is None or source.op_type not in ("Cast", "Identity") or casts == _MOST_CASTS:
                return None
            elif (values := find_extremes(next(iter(source.input), ""), casts + 1)) is None:
                return None
            elif source.op_type == "Cast":
                (to,) = (one.i for one in source.attribute if one.name == "to")
                values = values.astype(helper.tensor_dtype_to_np_dtype(to))
            found += [values.min(), values.max()] if values.size else [np.nan]
        return np.array(found) if found else None

    for node in nodes(graph):
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale = node.input[1] if len(node.input) > 1 else ""
        where, said = f"node {label(node)} ({node.op_type})", f"its scale {shown(scale)!r}"
        if scale not in made:
            raise SwinQuantError(f"{where} cannot be run: {said} is missing; export it again")
        try:
            with np.errstate(all="ignore"):
                if (found := find_extremes(scale)) is not None:
                    found = found.astype(np.float64)
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise SwinQuantError(f"{where}: {said} is not a number; export it again") from error
        if found is None:
            raise SwinQuantError(f"{where} cannot be run: {said} is computed, not constant; export it again")
        if not (np.isfinite(found) & (found > 0)).all():
            raise SwinQuantError(f"{where}: {said} must be finite and above zero; calibrate again")


def without_data(model: Any) -> Any:
    """`model` itself without the data of large tensors, which shape inference does not read."""
    for tensor in tensors(model):
        if tensor.ByteSize() > _KEPT_BYTES:
            for field in ("raw_data", *_TYPED_FIELDS):
                tensor.ClearField(field)
    return model


def infer_shapes(model: Any) -> Any:
    """The graph with functions inlined and the shape of every tensor. Drops the data of large tensors from `model`.

    SwinQuantError for a graph that contradicts itself or has a tensor of more than MAX_ELEMENTS.
    """
    from onnx import ModelProto

    try:
        graph = ModelProto.FromString(ask(without_data(model).SerializeToString(), "strict")).graph
    except InferenceError as error:
        raise SwinQuantError(f"its graph makes no sense: {first_line(error)}") from error
    for value in (value for each in graphs(graph) for value in (*each.input, *each.value_info, *each.output)):
        elements = math.prod(max(size.dim_value, 1) for size in value.type.tensor_type.shape.dim)  # an open size is 1
        if elements > MAX_ELEMENTS:
            fault = f"would have {float(elements):.3g} elements: no Swin has that"
            raise SwinQuantError(f"tensor {shown(value.name)} {fault}")
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
