"""The products of a captured network: each one's kind, its nodes, and the reason if it has none."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.models.capture import packet
from swin_quant.models.placement import source_of
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.quantizer import Quantizer

_MATMULS = frozenset("matmul bmm mm baddbmm addmm einsum".split())
_TRANSPOSED = "convtranspose"
_LAYERS = frozenset("linear conv1d conv2d conv3d convtranspose1d convtranspose2d convtranspose3d lstm gru".split())
_MODULES = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)
_INT8 = frozenset("linear conv1d conv2d conv3d matmul bmm".split())
# Reasons why a product has no nodes: the first one that applies counts.
_REASONS: tuple[tuple[str, Callable[["_Float"], bool]], ...] = (
    ("no int8 kind of it", lambda product: product.kind not in _INT8),
    ("reads the pictures, left float", lambda product: product.reads_pictures),
    ("a factor is no activation", lambda product: product.kind in _MATMULS),
    ("its weight depends on the pictures", lambda product: product.weight_depends),
    ("its weight is a constant, shared or computed", lambda product: True),
)


@dataclass(frozen=True)
class _Float:
    """The facts that decide why a product has no nodes."""

    kind: str
    reads_pictures: bool = False
    weight_depends: bool = False

    @property
    def reason(self) -> str:
        return next(reason for reason, holds in _REASONS if holds(self))


@dataclass(frozen=True)
class Multiplication:
    """A multiplying operation: its kind, and its multiplications for a picture.

    `nodes`: the quantizers of its factors; `reason`: why it has none.
    """

    kind: str
    multiplications: int
    nodes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """How much of a network is quantized under a policy. `left`: the number of other products by kind and reason."""

    quantized: int
    products: int
    share: float
    left: dict[str, int]

    def __str__(self) -> str:
        share = f"{100 * self.share:.0f} % of the multiplications"
        text = f"{self.quantized} of {self.products} products are quantized, {share}"
        left = ", ".join(f"{count} {reason}" for reason, count in self.left.items())
        return f"{text}; float: {left}" if left else text


def coverage(products: Sequence[Multiplication], enabled: Collection[str]) -> Coverage:
    """The coverage of products by the enabled nodes."""
    done = [one for one in products if one.nodes and {*one.nodes} <= {*enabled}]
    left = Counter(f"{one.kind} ({one.reason or 'left out by the policy'})" for one in products if one not in done)
    total = sum(one.multiplications for one in products)
    return Coverage(len(done), len(products), sum(one.multiplications for one in done) / max(total, 1), dict(left))


def products(graph: fx.Graph, root: nn.Module, pictures: int) -> Iterator[Multiplication]:
    """The products of a graph with nodes, captured with this many pictures."""
    for node in graph.nodes:
        if not node.meta.get("depends"):
            continue
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = _word(module) if module is not None else packet(node).replace("_", "")
        if isinstance(module, QuantizedLayer):
            nodes = tuple(f"{node.target}.{part}" for part in ("_input_quantizer", "_weight_quantizer"))
            yield Multiplication(kind, _of_layer(kind, node, module.weight, pictures), nodes)
        elif isinstance(module, _MODULES):
            reason = _Float(kind, reads_pictures=True).reason
            yield Multiplication(kind, _of_layer(kind, node, next(module.parameters()), pictures), reason=reason)
        elif kind in _LAYERS:
            weight = node.args[1].meta if isinstance(node.args[1], fx.Node) else {}
            reads = source_of(cast(fx.Node, node.args[0]), root).op == "placeholder"
            reason = _Float(kind, reads, bool(weight.get("depends"))).reason
            yield Multiplication(kind, _of_layer(kind, node, weight.get("val"), pictures), reason=reason)
        elif kind in _MATMULS:
            nodes = tuple(
                str(one.target) for one in node.args[:2] if isinstance(one, fx.Node) and _is_quantizer(one, root)
            )
            whole = len(nodes) == 2
            reason = "" if whole else _Float(kind).reason
            yield Multiplication(kind, _of_matmul(node, pictures), nodes if whole else (), reason)


def _word(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Quant").removeprefix("Borrowed").lower()


def _is_quantizer(node: fx.Node, root: nn.Module) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Quantizer)


def _of_layer(kind: str, node: fx.Node, weight: Any, pictures: int) -> int:
    out, given = node.meta.get("val"), cast(fx.Node, node.args[0]).meta.get("val")
    if not isinstance(out, Tensor) or not isinstance(weight, Tensor):
        return 0
    if isinstance(given, Tensor) and _TRANSPOSED in kind:  # each input multiplies the weights of its channel
        return _elements(given) * (weight.numel() // _hint(given.shape[1])) // pictures
    return _elements(out) * (weight.numel() // weight.shape[0]) // pictures


def _of_matmul(node: fx.Node, pictures: int) -> int:
    out, left = node.meta.get("val"), node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(out, Tensor) or not isinstance(left, Tensor):
        return 0
    return _elements(out) * _hint(left.shape[-1]) // pictures


def _elements(tensor: Tensor) -> int:
    return math.prod(map(_hint, tensor.shape))


def _hint(extent: Any) -> int:
    """An extent's value for the pictures of the capture."""
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)
