"""Every GEMM and matmul of a graph: where it is, and whether it can run in int8 or float8."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.inspect.graph import MOVES, Graph

if TYPE_CHECKING:
    from onnx import NodeProto

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})
INTEGER_PRODUCTS = frozenset({"QLinearMatMul", "MatMulInteger", "QLinearConv", "ConvInteger", "QGemm"})
FLOAT8 = "float8"
QUANTIZED = ("int8", FLOAT8)  # what the inputs of a product may be; weights of INT4 are int8 to whoever multiplies them
_FLOAT8_TYPES = frozenset({"float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_OUTPUT_CHANNEL = {"Gemm": 0, "Conv": 0}  # axis of a weight's output channels; a MatMul has them last


@dataclass(frozen=True)
class Operand:
    """One input of a product: its DequantizeLinear if there is one, seen through ops that only move values.

    `cast`: a Cast stands between the two, which not every engine sees through.
    """

    dequantize: "NodeProto | None"
    constant: bool
    cast: bool
    kind: str

    @property
    def format(self) -> str | None:
        """int8 or float8 if it is behind a DequantizeLinear."""
        if self.dequantize is None:
            return None
        return FLOAT8 if self.kind == FLOAT8 else "int8"


@dataclass(frozen=True)
class Gemm:
    """A product of two tensors. `kind`: linear (one side constant), matmul (both vary) or conv.

    `format`: int8 or float8 where both inputs are of that behind DequantizeLinear, int8 of an integer op, else None.
    `inputs`: int8, int4, float8 or the float type of both. `weight`: per-channel, per-tensor or None; `output_int8`:
    the result is quantized before it is used.
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
    """What stands before `tensor`: a DequantizeLinear, behind moves and Casts, or nothing of the kind."""
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
    """`per-channel` where the scale has more than one value."""
    return "per-tensor" if graph.one_value(dequantize.input[1]) else "per-channel"


def quantized_after(graph: Graph, tensor: str, passing: frozenset[str] = MOVES) -> bool:
    """Whether every use of `tensor`, seen through ops of `passing`, is a QuantizeLinear."""
    uses = list(graph.after(tensor, passing))
    return bool(uses) and tensor not in graph.outputs and all(node.op_type == "QuantizeLinear" for node in uses)


def find_gemms(graph: Graph) -> list[Gemm]:
    """Products in graph order; those of constants alone are left out, as any engine folds them."""
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
    """Whether a per-channel weight is scaled along another axis than that of its output channels."""
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
