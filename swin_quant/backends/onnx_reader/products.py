"""Counts the products of an ONNX graph: which can run in int8 or float8, and what stays float; and, for `analyze`, its
operators with their shapes and MACs. Nothing runs."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.backends.onnx_reader.checks import (
    STANDARD,
    check_operators,
    first_line,
    graphs,
    infer_shapes,
    label,
    nodes,
    shown,
    without_data,
)
from swin_quant.backends.onnx_reader.file import naming, read_model
from swin_quant.backends.onnx_reader.worker import InferenceError, ask
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.reading import reads
from swin_quant.operators.trace import Call, Shape

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FLOAT8 = "float8"
QUANTIZED = ("int8", FLOAT8)  # types of a product's inputs; INT4 weights are multiplied as int8
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})
_INTEGER_PRODUCTS = frozenset({"QLinearMatMul", "MatMulInteger", "QLinearConv", "ConvInteger", "QGemm"})
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
# Operators that move values and compute nothing: an integer tensor stays one through them. Casts change its float type.
_THROUGH = frozenset(
    {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Gather", "Cast"}
)
_QUIET = _PRODUCTS | _INTEGER_PRODUCTS | _THROUGH | {*_PAIRS, "Constant", "Shape", "Concat", "Expand"}
_DEPENDING = ("If", "Loop", "Scan", "NonZero", "Unique", "NonMaxSuppression", "Compress")
_NO_PARAMETERS = (7, 8, 9)  # TensorProto's INT64, STRING, BOOL: shapes and indices
_REACH = 64  # the most nodes followed in a row
_SCOPE = re.compile(r"'([^', ]+)'")
_TAIL = re.compile(r"\.(weight|bias)(_\w+)?$|\.?_(input|weight|aftergemm)_quantizer.*$")


@dataclass(frozen=True)
class Gemm:
    """A product of two tensors. `kind`: linear (one side constant), matmul (both vary) or conv.

    `format`: int8 or float8 if both inputs are dequantized from it, int8 for an integer operator, else None. `inputs`:
    each input's int8, int4, float8 or float type.
    """

    node: "NodeProto"
    name: str
    kind: str
    format: str | None
    inputs: tuple[str, str]

    @property
    def int8(self) -> bool:
        return self.format == "int8"


@dataclass(frozen=True)
class Inspection:
    """The products of a graph. `body`: the type of most results; `pairs`: Q and DQ nodes; `asymmetric`: those that are
    not int8 or float8 E4M3 with zero point 0; `float_ops`: how often each other operator computes."""

    opset: int
    body: str
    gemms: list[Gemm]
    float_ops: dict[str, int]
    pairs: tuple[int, int]
    asymmetric: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "opset": self.opset,
            "body": self.body,
            "quantize_linear": self.pairs[0],
            "dequantize_linear": self.pairs[1],
            "int8_gemms": sum(gemm.int8 for gemm in self.gemms),
            "float8_gemms": sum(gemm.format == FLOAT8 for gemm in self.gemms),
            "gemms": [
                {"node": gemm.node.name, "op": gemm.node.op_type, "inputs": list(gemm.inputs)}
                | {"name": gemm.name, "kind": gemm.kind, "int8": gemm.int8}
                for gemm in self.gemms
            ],
            "asymmetric": self.asymmetric,
            "float_ops": self.float_ops,
        }


def inspect_model(model: "ModelProto") -> Inspection:
    """Analyse the main graph of a model. SwinQuantError if it is empty or out of order.

    Products of constants alone are left out: any engine folds them.
    """
    graph = _Graph(model)
    gemms = [
        graph.describe(node)
        for node in graph.nodes
        if (node.op_type in _PRODUCTS and len(node.input) >= 2) or node.op_type in _INTEGER_PRODUCTS
        if node.output and not graph.constant.issuperset(filter(None, node.input))
    ]
    bodies = Counter(graph.types.get(gemm.node.output[0], "unknown") for gemm in gemms)
    counts = Counter(node.op_type for node in graph.nodes if not graph.constant.issuperset(node.output))
    every = Counter(node.op_type for node in graph.nodes)
    return Inspection(
        opset=next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 0),
        body=bodies.most_common(1)[0][0] if bodies else "unknown",
        gemms=gemms,
        float_ops={shown(op): count for op, count in counts.most_common() if op not in _QUIET},
        pairs=(every[_PAIRS[0]], every[_PAIRS[1]]),
        asymmetric=[label(node) for node in graph.nodes if node.op_type in _PAIRS and not graph.is_symmetric(node)],
    )


class _Graph:
    """The main graph of a model with functions inlined: maker and type of each tensor, and the constants."""

    def __init__(self, model: "ModelProto") -> None:
        from onnx import TensorProto

        if not model.graph.node or not model.graph.output:
            raise SwinQuantError("the ONNX graph is empty: it has no node or no output")
        kind, copy = type(model), type(model)()
        copy.CopyFrom(model)
        try:  # functions inlined and shapes inferred as far as possible
            graph = kind.FromString(ask(without_data(copy).SerializeToString(), "lenient")).graph
        except InferenceError as error:
            if model.functions:
                raise SwinQuantError(f"its functions cannot be inlined: {first_line(error)}") from error
            graph = copy.graph  # inference fails on some foreign graphs: then only the shapes are unknown
        self.nodes = list(graph.node)
        self.values: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.makers: dict[str, NodeProto] = {}
        self.constant = set(self.values)
        known = {*self.values, *(value.name for value in graph.input), ""}
        for node in self.nodes:  # in an order in which no walk can go in circles
            if unknown := [name for name in node.input if name not in known]:
                raise SwinQuantError(f"node {label(node)} uses {shown(unknown[0])!r} before anything makes it")
            if twice := [name for name in node.output if name and name in known]:
                raise SwinQuantError(f"node {label(node)} makes {shown(twice[0])!r} a second time")
            known.update(node.output)
            self.makers.update(dict.fromkeys(node.output, node))
            is_opaque = any(one.HasField("g") for one in node.attribute)
            read = [*filter(None, node.input)]
            if node.op_type == "Constant" or (read and self.constant.issuperset(read) and not is_opaque):
                self.constant.update(node.output)
                tensors = [one.t for one in node.attribute if node.op_type == "Constant" and one.name == "value"]
                self.values.update({name: tensor for tensor in tensors for name in node.output})
        values = (*graph.input, *graph.value_info, *graph.output)
        numbers = {value.name: value.type.tensor_type.elem_type for value in values}
        numbers |= {name: tensor.data_type for name, tensor in self.values.items()}
        words = {number: word.lower() for word, number in TensorProto.DataType.items()}
        words |= {TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64"}
        self.types = {name: words.get(number, "unknown") for name, number in numbers.items()}

    def is_symmetric(self, node: "NodeProto") -> bool:
        """Whether a Q/DQ node is int8 or float8 E4M3 with zero point 0; zero points in other files are not read."""
        stored = node.output[:1] if node.op_type == "QuantizeLinear" else node.input[:1]
        zeros = [self.values[name] for name in node.input[2:3] if name in self.values]
        is_eight = all(self.types.get(name, "unknown") in ("int8", "float8e4m3fn", "unknown") for name in stored)
        return is_eight and not any(zero.raw_data.strip(b"\0") or any(zero.int32_data) for zero in zeros)

    def describe(self, node: "NodeProto") -> Gemm:
        """The product that a node computes."""
        name = self._find_module(node)
        if node.op_type in _INTEGER_PRODUCTS:
            return Gemm(node, name, "conv" if "Conv" in node.op_type else "linear", "int8", ("int8", "int8"))
        (one, first), (other, second) = (self._find_type(side) for side in node.input[:2])
        is_linear = any(side in self.constant for side in node.input[:2])
        kind = "conv" if node.op_type == "Conv" else "linear" if is_linear else "matmul"
        return Gemm(node, name, kind, first if first == second else None, (one, other))

    def _find_type(self, tensor: str) -> tuple[str, str | None]:
        """The type that a tensor has, or was stored in before moves and Casts, and the format of a product of it."""
        node = self.makers.get(tensor)
        for _ in range(_REACH):
            if node is None or node.op_type not in _THROUGH or not node.input:
                break
            node = self.makers.get(node.input[0])
        if node is None or node.op_type != "DequantizeLinear" or len(node.input) < 2:
            return self.types.get(tensor, "unknown"), None
        stored = self.types.get(node.input[0], "unknown")
        if stored in ("uint16", "int16"):
            return stored, None
        if stored.startswith("float8"):
            return FLOAT8, FLOAT8
        return "int4" if stored in ("int4", "uint4") else "int8", "int8"

    def _find_module(self, node: "NodeProto") -> str:
        """The module's name from the node's weight (`layers.0.blocks.1.attn.qkv`), else from the scopes that torch's
        exporter recorded, else the node's own name."""
        pending = [name for name in node.input if name in self.constant]
        for name in itertools.islice(pending, _REACH):  # it grows by what a constant is made of
            maker = self.makers.get(name)
            pending += filter(None, maker.input if maker is not None else ())
            own = name if maker is None else maker.name
            if "." in own and (stem := _TAIL.sub("", own)) != own:
                return stem
        scopes = [entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
        return ".".join(_SCOPE.findall(scopes[0])[-2:] if scopes else ()) or label(node)


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
