"""Finds attention in a graph, and says which of the patterns that engines fuse it matches.

An attention is MatMul (Q K^T), some ops, Softmax, some ops, MatMul (with V). A condition is one need of a fused kernel:
a function that returns the reason why it does not hold. A pattern is a list of conditions. Sources: TensorRT facts
("fused attention"): NVIDIA's documentation, TRT#2981, #3243, #3280, #3575 for the sizes, and TRT#4167 for the pair
behind the second product. Float8 has the conditions of int8 except the sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.inspect.gemms import FLOAT8, operand, quantized_after
from swin_quant.backends.onnx_reader.inspect.graph import Graph

if TYPE_CHECKING:
    from onnx import NodeProto

HEAD_SIZES = (16, 32, 64)  # fusible in int8, as users of TensorRT 8.6 and later report
MAX_TOKENS = 512
_HALF_SIZES = range(16, 257, 8)  # head sizes of any fused attention, float16 and float8
_TO_PAIR = frozenset({"Transpose", "Reshape"})  # the only ops allowed between the second product and its pair
_REACH = 32  # the most nodes searched on either side of a softmax
_SCALES = frozenset({"Mul", "Div"})
_EITHER_SIDE = frozenset({"Cast", "QuantizeLinear", "DequantizeLinear", "Identity", "Reshape", "Transpose"})
_TO_LOGITS = _EITHER_SIDE | {"Add", "Sub", "Mul", "Div", "Where", "Unsqueeze", "Squeeze", "Expand", "Clip"}
_TO_PRODUCT = _EITHER_SIDE | {"Dropout"}


@dataclass(frozen=True)
class Attention:
    """One attention: Q K^T, the nodes from there to the softmax, in order, and the product with V.

    Sizes are None if not fixed.
    """

    name: str
    block: str | None
    scores: "NodeProto"
    between: list["NodeProto"]
    product: "NodeProto"
    head_size: int | None
    tokens: int | None


@dataclass(frozen=True)
class Verdict:
    """The best pattern that holds; `failed`: every condition that does not, with the reason."""

    attention: Attention
    pattern: str
    fusible: bool
    failed: dict[str, str]


def find_attention(graph: Graph) -> tuple[list[Attention], list["NodeProto"]]:
    """Every attention, in graph order, and the softmaxes without one."""
    found: list[Attention] = []
    strange: list[NodeProto] = []
    for softmax in (node for node in graph.nodes if node.op_type == "Softmax"):
        before, product = _back_to_matmul(graph, softmax), _on_to_matmul(graph, softmax)
        if before is None or product is None:
            strange.append(softmax)
            continue
        between, scores = before
        block = next(filter(None, map(graph.block, (softmax, scores, product, *between))), None)
        shape = graph.shapes.get(scores.input[0], ())
        head_size, tokens = (shape[-1], shape[-2]) if len(shape) >= 2 else (None, None)
        name = f"{block}.attn" if block else f"attention {len(found)}"
        found.append(Attention(name, block, scores, between, product, head_size, tokens))
    return found, strange


def _back_to_matmul(graph: Graph, softmax: "NodeProto") -> tuple[list["NodeProto"], "NodeProto"] | None:
    """The nodes from a matmul of two varying inputs to `softmax`, and that matmul; a sum is followed on either side."""
    seen: set[str] = set()

    def walk(tensor: str) -> tuple[list["NodeProto"], "NodeProto"] | None:
        node = graph.producer.get(tensor)
        if node is None or tensor in seen or len(seen) > _REACH:
            return None
        seen.add(tensor)
        if node.op_type == "MatMul":
            return ([], node) if len(graph.variable_inputs(node)) == 2 else None
        if node.op_type not in _TO_LOGITS:
            return None
        paths = (walk(name) for name in graph.variable_inputs(node))
        path = next(filter(None, paths), None)
        return path and ([*path[0], node], path[1])

    return walk(softmax.input[0])


def _on_to_matmul(graph: Graph, node: "NodeProto") -> "NodeProto | None":
    """The matmul that alone reads a softmax."""
    for _ in range(_REACH):
        users = graph.consumers.get(node.output[0], [])
        if len(users) != 1:
            return None
        (node,) = users
        if node.op_type == "MatMul":
            return node
        if node.op_type not in _TO_PRODUCT:
            return None
    return None


def _scale(graph: Graph, at: Attention) -> str | None:
    late = [graph.label(node) for node in at.between if node.op_type in _SCALES]
    return f"scaled after Q K^T ({late[0]}): fold the scale into q" if late else None


def _mask(graph: Graph, at: Attention) -> str | None:
    adds = [node for node in at.between if node.op_type in ("Add", "Sub", "Where")]
    if len(adds) > 1:
        return f"bias and mask are {len(adds)} additions: fold them into one constant"
    if adds and len(graph.variable_inputs(adds[0])) > 1:
        return f"{graph.label(adds[0])} adds a value computed from the picture or its size, not one constant"
    return None


def _plain(graph: Graph, at: Attention) -> str | None:
    known = (*_SCALES, "Add", "Sub", "Where")
    others = [f"{node.op_type} {graph.label(node)}" for node in at.between if node.op_type not in known]
    return f"{others[0]} stands between Q K^T and the softmax" if others else None


def _operand(graph: Graph, at: Attention, name: str, product: str, side: int) -> str | None:
    source = operand(graph, getattr(at, product).input[side])
    if source.format is None:
        return f"{name} is {source.kind}: no Q/DQ in front of {graph.label(getattr(at, product))}"
    return f"a Cast stands between the DequantizeLinear of {name} and its matmul" if source.cast else None


def _out(graph: Graph, at: Attention) -> str | None:
    if quantized_after(graph, at.product.output[0], _TO_PAIR):
        return None
    return f"the result of {graph.label(at.product)} is not quantized before it is used"


def _format(graph: Graph, at: Attention) -> str | None:
    kinds = {kind for kind in _formats(graph, at) if kind}
    return f"its products are of {' and '.join(sorted(kinds))}" if len(kinds) > 1 else None


def _formats(graph: Graph, at: Attention) -> list[str | None]:
    return [operand(graph, tensor).format for node in (at.scores, at.product) for tensor in node.input]


def _head_size(graph: Graph, at: Attention) -> str | None:
    if at.head_size is not None and at.head_size not in _HALF_SIZES:
        return f"head size {at.head_size}: fused attention wants a multiple of 8 from 16 to 256"
    return None


def _size(graph: Graph, at: Attention) -> str | None:
    if FLOAT8 in _formats(graph, at):
        return None
    if at.head_size is not None and at.head_size not in HEAD_SIZES:
        return f"head size {at.head_size}: int8 fusion is reported for {', '.join(map(str, HEAD_SIZES))}"
    if at.tokens is not None and at.tokens > MAX_TOKENS:
        return f"{at.tokens} tokens a window: int8 fusion is reported up to {MAX_TOKENS}"
    return None


CONDITIONS: dict[str, Callable[[Graph, Attention], str | None]] = {
    "scale before Q K^T": _scale,
    "one constant mask": _mask,
    "no other op": _plain,
    "q quantized": partial(_operand, name="q", product="scores", side=0),
    "k quantized": partial(_operand, name="k", product="scores", side=1),
    "softmax quantized": partial(_operand, name="the softmax", product="product", side=0),
    "v quantized": partial(_operand, name="v", product="product", side=1),
    "one format": _format,
    "result quantized": _out,
    "head size": _head_size,
    "sizes": _size,
}
_SHAPE = ("scale before Q K^T", "one constant mask", "no other op")
_INPUTS = ("q quantized", "k quantized", "softmax quantized", "v quantized")
# Pattern -> its conditions, best pattern first; float8 attention has "float8" for "int8" in the name. "Fusible" means
# the documented shape: only an engine's own layer report shows whether it was fused.
PATTERNS: dict[str, tuple[str, ...]] = {
    "fusible int8": tuple(CONDITIONS),
    "fusible float": (*_SHAPE, "head size"),
    "int8 matmuls": (*_INPUTS, "one format"),
    "separate ops": (),
}
FUSIBLE = ("fusible int8", "fusible float8", "fusible float")


def judge(graph: Graph, attention: Attention) -> Verdict:
    """The best pattern of one attention. One with Q/DQ on some inputs only is not "fusible float" either."""
    reasons = {name: condition(graph, attention) for name, condition in CONDITIONS.items()}
    failed = {name: reason for name, reason in reasons.items() if reason}
    quantized = [name for name in _INPUTS if name not in failed]
    patterns = [name for name, needs in PATTERNS.items() if not set(needs) & set(failed)]
    if quantized and "fusible float" in patterns:
        patterns.remove("fusible float")
    is_float8 = FLOAT8 in _formats(graph, attention)
    pattern = patterns[0].replace("int8", FLOAT8) if is_float8 else patterns[0]
    return Verdict(attention, pattern, pattern in FUSIBLE, failed)
