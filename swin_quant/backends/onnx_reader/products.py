"""Counts the products of an ONNX graph: which can run in int8 or float8, and what stays float. Nothing runs."""

import itertools
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from swin_quant.backends.onnx_reader.checks import STANDARD, infer_shapes, label, shown
from swin_quant.base.errors import SwinQuantError

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
_REACH = 64  # the most nodes followed in a row
_TAIL = re.compile(r"\.(weight|bias)(_\w+)?$|\.?_(input|weight|aftergemm)_quantizer.*$")


@dataclass(frozen=True)
class Gemm:
    """A product of two tensors, by its `node`. `kind`: linear (one side constant), matmul (both vary) or conv.

    `format`: int8 or float8 if both inputs are dequantized from it, int8 for an integer operator, else None. `inputs`:
    each input's int8, int4, float8 or float type.
    """

    node: str
    op: str
    name: str
    kind: str
    format: str | None
    inputs: tuple[str, str]


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
        """The report as data for JSON, with the number of products in each format."""
        return asdict(self) | {f"{kind}_gemms": sum(one.format == kind for one in self.gemms) for kind in QUANTIZED}


def inspect_model(model: "ModelProto") -> Inspection:
    """Analyse the main graph of a model. SwinQuantError if it is empty or out of order.

    Products of constants alone are left out: any engine folds them.
    """
    graph = _Graph(model)
    products = [
        node
        for node in graph.nodes
        if (node.op_type in _PRODUCTS and len(node.input) >= 2) or node.op_type in _INTEGER_PRODUCTS
        if node.output and not graph.constant.issuperset(filter(None, node.input))
    ]
    bodies = Counter(graph.types.get(node.output[0], "unknown") for node in products)
    counts = Counter(node.op_type for node in graph.nodes if not graph.constant.issuperset(node.output))
    every = Counter(node.op_type for node in graph.nodes)
    return Inspection(
        opset=next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 0),
        body=bodies.most_common(1)[0][0] if bodies else "unknown",
        gemms=[graph.describe(node) for node in products],
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
        try:
            graph = infer_shapes(model)
        except SwinQuantError:
            if model.functions:
                raise
            graph = model.graph  # inference fails on some foreign graphs: then only the shapes are unknown
        self.nodes = list(graph.node)
        self.values: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.makers: dict[str, NodeProto] = {name: node for node in self.nodes for name in node.output}
        self.constant = set(self.values)
        for node in self.nodes:
            is_opaque = any(one.HasField("g") for one in node.attribute)
            read = [*filter(None, node.input)]
            if node.op_type == "Constant" or (read and self.constant.issuperset(read) and not is_opaque):
                self.constant.update(node.output)
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
        named = node.name, node.op_type, self._find_module(node)
        if node.op_type in _INTEGER_PRODUCTS:
            return Gemm(*named, "conv" if "Conv" in node.op_type else "linear", "int8", ("int8", "int8"))
        (one, first), (other, second) = (self._find_type(side) for side in node.input[:2])
        is_linear = any(side in self.constant for side in node.input[:2])
        kind = "conv" if node.op_type == "Conv" else "linear" if is_linear else "matmul"
        return Gemm(*named, kind, first if first == second else None, (one, other))

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
        """The module's name from the node's weight (`layers.0.blocks.1.attn.qkv`), else the node's own name."""
        pending = [name for name in node.input if name in self.constant]
        for name in itertools.islice(pending, _REACH):  # it grows by what a constant is made of
            maker = self.makers.get(name)
            pending += filter(None, maker.input if maker is not None else ())
            own = name if maker is None else maker.name
            if "." in own and (stem := _TAIL.sub("", own)) != own:
                return stem
        return label(node)
