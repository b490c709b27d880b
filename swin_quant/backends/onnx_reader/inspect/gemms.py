"""Finds every GEMM and matmul of a graph, its block, and whether it can run in int8 or float8."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.inspect.graph import MOVES, Graph

if TYPE_CHECKING:
    from onnx import NodeProto

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})
INTEGER_PRODUCTS = frozenset({"QLinearMatMul", "MatMulInteger", "QLinearConv", "ConvInteger", "QGemm"})
FLOAT8 = "float8"
QUANTIZED = ("int8", FLOAT8)  # types of a product's inputs; INT4 weights are multiplied as int8
_FLOAT8_TYPES = frozenset({"float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_OUTPUT_CHANNEL = {"Gemm": 0, "Conv": 0}  # axis of a weight's output channels; the last one in a MatMul


@dataclass(frozen=True)
class Operand:
    """One input of a product: the DequantizeLinear in front, if any, looking through ops that only move values.

    `cast`: a Cast stands between the two; not every engine looks through it.
    """

    dequantize: "NodeProto | None"
    constant: bool
    cast: bool
    kind: str

    @property
    def format(self) -> str | None:
        """int8 or float8 behind a DequantizeLinear, else None."""
        if self.dequantize is None:
            return None
        return FLOAT8 if self.kind == FLOAT8 else "int8"


@dataclass(frozen=True)
class Gemm:
    """A product of two tensors. `kind`: linear (one side constant), matmul (both vary) or conv.

    `format`: int8 or float8 if both inputs are dequantized from it, int8 for an integer op, else None. `inputs`: each
    input's int8, int4, float8 or float type. `weight`: per-channel, per-tensor or None. `output_int8`: the result is
    quantized before it is used.
    """

    node: "NodeProto"
    name: str
    block: str | None
    kind: str
    op: str
    format: str | None
    inputs: tuple[str, str]
    weight: str | None
    output_int8: bool
    operands: tuple[Operand, Operand] | None

    @property
    def int8(self) -> bool:
        return self.format == "int8"


def operand(graph: Graph, tensor: str) -> Operand:
    """The DequantizeLinear before `tensor`, if any, looking through moves and Casts."""
    node = graph.before(tensor)
    cast = node is not None and node.op_type == "Cast"
    if cast:
        node = graph.before(tensor, MOVES | {"Cast"})
    found = node if node is not None and node.op_type == "DequantizeLinear" else None
    kind = graph.types.get(tensor, "unknown")
    if found is not None:
        stored = graph.types.get(found.input[0])
        kind = "int4" if stored in ("int4", "uint4") else FLOAT8 if stored in _FLOAT8_TYPES else "int8"
    return Operand(found, tensor in graph.constant, cast and found is not None, kind)


def granularity(graph: Graph, dequantize: "NodeProto") -> str:
    """`per-channel` if the scale has more than one value, else `per-tensor`."""
    return "per-tensor" if graph.one_value(dequantize.input[1]) else "per-channel"


def quantized_after(graph: Graph, tensor: str, passing: frozenset[str] = MOVES) -> bool:
    """Whether every use of `tensor`, looking through ops of `passing`, is a QuantizeLinear."""
    uses = list(graph.after(tensor, passing))
    return bool(uses) and tensor not in graph.outputs and all(node.op_type == "QuantizeLinear" for node in uses)


def find_gemms(graph: Graph) -> list[Gemm]:
    """Products in graph order, except products of constants alone, which any engine folds."""
    return [
        _gemm(graph, node)
        for node in graph.nodes
        if node.op_type in PRODUCTS | INTEGER_PRODUCTS and graph.variable_inputs(node)
        if node.op_type in INTEGER_PRODUCTS or len(node.input) >= 2
    ]


def _gemm(graph: Graph, node: "NodeProto") -> Gemm:
    block, name = graph.block(node), graph.module(node)
    output_int8 = quantized_after(graph, node.output[0])
    if node.op_type in INTEGER_PRODUCTS:
        kind = "conv" if "Conv" in node.op_type else "linear"
        return Gemm(node, name, block, kind, node.op_type, "int8", ("int8", "int8"), None, output_int8, None)
    left, right = (operand(graph, tensor) for tensor in node.input[:2])
    kind = "conv" if node.op_type == "Conv" else "linear" if left.constant or right.constant else "matmul"
    weights = [side.dequantize for side in (left, right) if side.constant and side.dequantize is not None]
    weight = granularity(graph, weights[0]) if weights else None
    format = left.format if left.format == right.format else None
    kinds = (left.kind, right.kind)
    return Gemm(node, name, block, kind, node.op_type, format, kinds, weight, output_int8, (left, right))


def wrong_axis(graph: Graph, gemm: Gemm) -> bool:
    """Whether a per-channel weight has its scales along another axis than its output channels."""
    weights = [side.dequantize for side in gemm.operands or () if side.constant and side.dequantize is not None]
    if not weights or gemm.weight != "per-channel":
        return False
    dequantize = weights[0]
    rank = len(graph.shapes.get(dequantize.output[0]) or graph.shapes.get(dequantize.input[0]) or ())
    axis = next((a.i for a in dequantize.attribute if a.name == "axis"), 1)
    wanted = _OUTPUT_CHANNEL.get(gemm.op, rank - 1)
    if gemm.op == "Gemm" and not any(a.name == "transB" and a.i for a in gemm.node.attribute):
        wanted = 1
    if gemm.op == "MatMul" and graph.producer.get(gemm.node.input[1]) is not dequantize:
        wanted = 0  # a Transpose stands between
    return rank > 0 and axis % rank != wanted
