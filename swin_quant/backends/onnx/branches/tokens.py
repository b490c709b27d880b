"""Attention branches of a captured network: a norm, q, k and v, attention among all tokens, proj, and the addition.

Between the products a network may cut, turn and stack its tensors as it likes: these operations run on the numbers of
the values, which shows where each channel of a head comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import layer_norm

from swin_quant.backends.onnx.branches.mlp import find_scale_fault, scale_outputs, scaled_norm
from swin_quant.backends.onnx.branches.walk import BranchWalk, find_owner, layer_scale, linear, norm, sides
from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.swin.attention_operator import inside_windows
from swin_quant.backends.onnx.swin.int8_operators import NormAndLinears, find_fault, plugged
from swin_quant.models.placement import MATMULS, SIZES, name_operation
from swin_quant.operators.plugins import FAST_HEADS

_VIEWS = frozenset(
    "flatten unflatten reshape view permute transpose t movedim swapaxes squeeze unsqueeze getitem select slice unbind "
    "split splitwithsizes chunk contiguous clone identity dropout".split()
)
_PICTURES = 2  # that the graph was captured with


@plugged
def token_branch(
    x: Tensor, *constants: Tensor, heads: int, scales: Sequence[float], norm_last: bool, epsilon: float
) -> Tensor:
    """The operator in torch: x + proj(attention(qkv(norm(x)))) among all tokens of a picture.

    With `norm_last` the norm is behind `proj`. x: float32 [B, T, C], as the result. constants: as in
    `attention_branch`, from the norm to proj. scales: of q, k, v, and of the softmax if it is rounded to int8.
    """
    gain, offset, *linears = constants
    y = x if norm_last else layer_norm(x, x.shape[-1:], gain, offset, epsilon)
    none = torch.zeros(1, heads, x.shape[1], x.shape[1])
    y = inside_windows(y, linears, none, (), heads, scales)
    return x + (layer_norm(y, x.shape[-1:], gain, offset, epsilon) if norm_last else y)


class OperatorTokenBranch(NormAndLinears):
    """The norm, attention and addition of a block as one operator: float32 [B, T, C] -> [B, T, C]."""

    operator = "token_branch"

    def __init__(
        self, norm: nn.Module, norm_last: bool, qkv: Linear, proj: Linear, heads: int, scales: list[float]
    ) -> None:
        super().__init__(norm, norm_last, qkv=qkv, proj=proj)
        self.heads, self.scales = heads, scales

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        return token_branch(x, *self.constants(), **self.attributes, heads=self.heads, scales=self.scales)


@dataclass(frozen=True)
class Operand:
    """q, k or v of all heads.

    `columns`: which outputs of the linear `layer` are the channels [heads, depth]. `factor`: multiplies them before
    `pair` rounds them.
    """

    layer: Linear
    columns: Tensor
    factor: float
    pair: nn.Module


@dataclass(frozen=True)
class TokenBranch:
    """An attention branch: the addition that ends it, the stream that it reads, and its parts.

    `rows`: which channel of proj's input each channel of a head is. `logit_factor`: the factor of q k^T. `tokens`:
    their number, no integer if any number will do; None: they are no [B, T, C].
    """

    addition: fx.Node
    stream: fx.Node
    owner: str
    norm: nn.LayerNorm
    norm_last: bool
    operands: tuple[Operand, Operand, Operand]
    softmax: nn.Module | None
    proj: Linear
    rows: Tensor
    logit_factor: float
    tokens: Any
    scale: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        return self.norm_last, isinstance(self.softmax, Pair)

    @property
    def fault(self) -> str | None:
        """The reason why the operator cannot compute it; None if it can."""
        pairs = [*(one.pair for one in self.operands), self.proj._input_quantizer]
        if self.softmax is not None and not isinstance(self.softmax, nn.Identity):
            pairs.append(self.softmax)
        if not all(map(_is_int8, pairs)):
            return "has a float node or a zero point: choose ‹policy› cpu-operators"
        layers: set[Any] = {one.layer for one in self.operands}
        if fault := next(filter(None, map(find_fault, (*layers, self.proj))), None):
            return fault
        inputs = {(float(one._input_quantizer.scale), one._input_quantizer.zero_point) for one in layers}
        if len(inputs) > 1:
            return "rounds its tokens in several ways"
        width = self.norm.normalized_shape[0]
        if self.rows.numel() != width or any(one.columns.shape != self.rows.shape for one in self.operands):
            return "changes its width"
        if any(one.factor <= 0 for one in self.operands) or self.logit_factor <= 0 or self.tokens is None:
            return "has a factor below zero, or no tokens [B, T, C]"
        return None if self.norm_last else find_scale_fault(self.proj, self.scale)

    @property
    def is_fast(self) -> bool:
        depth = self.rows.shape[1]
        return isinstance(self.tokens, int) and self.tokens <= FAST_HEADS.get(depth, 0)

    def operator(self) -> nn.Module:
        """The module that computes it, with the layer scale in its last part. The parts are used up."""
        q, k, v = self.operands
        scales = [float(one.pair.scale) for one in self.operands]  # type: ignore[arg-type]  # pairs have one
        scales[0] *= self.logit_factor
        if isinstance(self.softmax, Pair):
            scales.append(float(self.softmax.scale))
        factors = (q.factor * self.logit_factor, k.factor, v.factor)
        qkv = _joined(self.operands, factors)
        weight = self.proj._weight_quantizer
        weight.values = weight.values[self.rows.flatten()].contiguous()
        own = self.norm
        if self.scale is not None and self.norm_last:
            own = scaled_norm(self.norm, self.scale)
        elif self.scale is not None:
            scale_outputs(self.proj, self.scale)
        return OperatorTokenBranch(own, self.norm_last, qkv, self.proj, len(self.rows), scales)


def _is_int8(pair: nn.Module) -> bool:
    """Whether a node rounds to int8 without a zero point."""
    return isinstance(pair, Pair) and pair.zero_point is None and not pair.offset and pair.format == "int8"


def _joined(operands: Sequence[Operand], factors: Sequence[float]) -> Linear:
    """One linear to q, k and v side by side, each head by head, multiplied by these factors."""
    parts = []
    for operand, factor in zip(operands, factors, strict=True):
        layer, columns = operand.layer, operand.columns.flatten()
        weight: Any = layer._weight_quantizer
        scale = weight.scale.expand(weight.values.shape[1])[columns] * factor
        bias = torch.zeros_like(scale) if layer.bias is None else layer.bias[columns] * factor
        parts.append((weight.values[:, columns], scale, bias))
    joined = operands[0].layer
    values, scales, biases = zip(*parts, strict=True)
    joined._weight_quantizer.values = torch.cat(values, 1).contiguous()
    joined._weight_quantizer.scale, joined.bias = torch.cat(scales), torch.cat(biases)
    return joined


def attentions(root: nn.Module, graph: fx.Graph) -> int:
    """The number of softmaxes in a graph that a product reads: attentions of any kind."""
    return sum(
        name_operation(node, root) == "softmax" and any(_is_product(one, root) for one in _readers(node, root))
        for node in graph.nodes
    )


def _readers(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """The operations that read a value, behind those that keep it."""
    found = []
    for user in node.users:
        is_passed = name_operation(user, root) in _VIEWS or isinstance(_quantizer(user, root), nn.Module)
        found += _readers(user, root) if is_passed else [user]
    return found


def _quantizer(node: fx.Node, root: nn.Module) -> nn.Module | None:
    is_one = node.op == "call_module" and str(node.target).endswith("_input_quantizer")
    return root.get_submodule(str(node.target)) if is_one else None


def _is_product(node: fx.Node, root: nn.Module) -> bool:
    return name_operation(node, root) in MATMULS


def token_branch_at(root: nn.Module, addition: fx.Node) -> TokenBranch | None:
    """The attention branch that ends in an addition; None if it is none, or has masks, biases or windows."""
    for branch, stream in sides(addition, root):
        for norm_last, steps in {False: (layer_scale, linear), True: (layer_scale, norm, linear)}.items():
            walk = BranchWalk(root, addition)
            made = walk.along(steps, branch)
            found = _attention(walk, made[1]) if made else None
            if made is None or found is None:
                continue
            scale, *own, proj = made[0]
            rows, logit_factor, softmax, operands, source, tokens = found
            ahead = ([], source) if norm_last else walk.along((norm,), source)
            if ahead is None or not walk.is_same(ahead[1], stream):
                continue
            (normed,) = own or ahead[0]
            return TokenBranch(
                addition, ahead[1], find_owner(proj, root), normed, norm_last, operands, softmax, proj, rows,
                logit_factor, tokens, scale,
            )  # fmt: skip
    return None


_Found = tuple[Tensor, float, nn.Module | None, tuple[Operand, Operand, Operand], fx.Node, Any]


def _attention(walk: BranchWalk, node: fx.Node) -> _Found | None:
    """What the input of proj is made of.

    The channels of heads in it, the factor of logits, the node of the softmax, q, k and v, the value that their linears
    read, and the number of tokens.
    """
    result = _Views(walk, node, _is_product)
    if result.source is None or result.factor != 1 or isinstance(result.pair, Pair):
        return None
    shares, value = result.source.args[:2]
    softmax = walk.up(shares)  # type: ignore[arg-type]  # nodes
    rounded = _quantizer(softmax, walk.root) if softmax is not None else None
    if rounded is not None and softmax is not None:
        softmax = walk.up(softmax.args[0])  # type: ignore[arg-type]
    if softmax is None or name_operation(softmax, walk.root) != "softmax" or not _is_over_keys(softmax, walk.root):
        return None
    logits = _Views(walk, softmax.args[0], _is_product)  # type: ignore[arg-type]
    if logits.source is None or logits.moves or isinstance(logits.pair, Pair):
        return None
    found = [_Views(walk, cast(fx.Node, one), _is_linear) for one in (*logits.source.args[:2], value)]
    if any(one.source is None or one.pair is None for one in found):
        return None
    layers = [linear(walk, one.source) for one in found if one.source is not None]
    steps = [one for one in layers if one is not None]
    if len(steps) < 3 or len({one.before for one in steps}) > 1 or not walk.is_closed():
        return None
    tensors = [one.numbers(_shape(one.source)) for one in found]
    columns = [_columns(one, step) for one, step in zip((tensors[0], tensors[1].mT, tensors[2]), steps, strict=True)]
    source = result.source
    rows = _rows(result.numbers(_shape(source)), _shape(source))
    if rows is None or any(one is None or one.shape[0] != len(rows) for one in columns):
        return None
    parts: Any = zip(steps, columns, found, strict=True)
    q, k, v = (Operand(step.found, own, one.factor, one.pair) for step, own, one in parts)
    value = cast(fx.Node, found[0].source).meta["val"]
    tokens = value.shape[1] if value.dim() == 3 else None
    return rows, logits.factor, rounded, (q, k, v), steps[0].before, tokens


def _is_over_keys(softmax: fx.Node, root: nn.Module) -> bool:
    """Whether a softmax is of the last dimension."""
    is_module = softmax.op == "call_module"
    dim: Any = getattr(root.get_submodule(str(softmax.target)), "dim", None) if is_module else softmax.args[1]
    return bool(dim == -1 or ("val" in softmax.meta and dim == softmax.meta["val"].dim() - 1))


def _is_linear(node: fx.Node, root: nn.Module) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Linear)


def _shape(node: fx.Node | None) -> tuple[int, ...]:
    """The shape of a node's output, for the pictures of the capture."""
    return tuple(map(_size, node.meta["val"].shape)) if node is not None else ()


def _size(extent: Any) -> int:
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)


class _Views:
    """The operations from a value up to its `source`, a product: they move, and multiply by one number.

    `source`: None if there is another operation, or if others read a value between.
    """

    def __init__(self, walk: BranchWalk, node: fx.Node, is_source: Callable[[fx.Node, nn.Module], bool]) -> None:
        self.walk, self.value, self.factor, self.moves = walk, node, 1.0, False
        self.pair: nn.Module | None = None
        self.source: fx.Node | None = None
        while isinstance(node, fx.Node) and not is_source(node, walk.root):
            if not self._passes(node):
                return
            walk.inside.add(node)
            node = node.args[0]  # type: ignore[assignment]
        if isinstance(node, fx.Node):
            self.source = node
            walk.inside.add(node)

    def _passes(self, node: fx.Node) -> bool:
        word = name_operation(node, self.walk.root)
        if (found := _quantizer(node, self.walk.root)) is not None and self.factor == 1 and self.pair is None:
            self.pair = found
        elif word in ("mul", "div") and len(node.args) == 2 and isinstance(node.args[1], int | float):
            self.factor *= node.args[1] if word == "mul" else 1 / node.args[1]
        elif word in _VIEWS:
            self.moves = self.moves or not self.walk.keeps(node)
        else:
            return False
        return True

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """The value, where the source gives the numbers of its values in order."""
        known: dict[fx.Node, Any] = {}

        def compute(node: fx.Node) -> Any:
            if node is self.source:
                return torch.arange(torch.Size(shape).numel()).view(shape)
            is_tensor = isinstance(node.meta.get("val", ()), Tensor | list | tuple)
            if name_operation(node, self.walk.root) in SIZES or not is_tensor:
                return _size(node.meta["val"])
            if node not in known:
                is_view = node.op == "call_function" and name_operation(node, self.walk.root) in _VIEWS
                args: Any = fx.map_arg(node.args if is_view else node.args[:1], compute)
                known[node] = node.target(*args, **node.kwargs) if is_view else args[0]  # type: ignore[operator]
            return known[node]

        return compute(self.value)


def _columns(numbers: Tensor, layer: Any) -> Tensor | None:
    """Which outputs of a linear, of tokens [B, T, F], are the channels [heads, depth] of an operand [..., T, depth]."""
    outputs = layer.found._weight_quantizer.values.shape[1] if hasattr(layer.found._weight_quantizer, "values") else 0
    return _order(numbers.flatten(0, -3), outputs) if numbers.dim() > 2 else None


def _rows(numbers: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Which channels of proj's input [B, T, C] are those [heads, depth] of a result of this shape, [..., T, depth]."""
    if numbers.dim() != 3 or numbers.numel() != torch.Size(shape).numel() or len(shape) < 3:
        return None
    inverse = numbers.flatten().argsort().view(shape).flatten(0, -3)
    return _order(inverse, numbers.shape[-1])


def _order(numbers: Tensor, channels: int) -> Tensor | None:
    """The channel of each place [heads, depth] of heads [B heads, T, depth].

    `numbers`: the place of each value in tokens [B, T, channels]. None if their order is another one.
    """
    stacked, tokens, depth = numbers.shape
    if stacked % _PICTURES or not channels:
        return None
    found = numbers.view(_PICTURES, stacked // _PICTURES, tokens, depth)
    order = found[0, :, 0] % channels
    places = torch.arange(_PICTURES * tokens).view(_PICTURES, 1, tokens, 1)
    return order if torch.equal(found, places * channels + order[:, None]) else None
