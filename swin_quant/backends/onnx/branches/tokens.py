"""Attention branches of a captured network: a norm, q, k and v, attention among all tokens, proj, and the addition."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.backends.onnx.branches.mlp import find_scale_fault, fold_scale
from swin_quant.backends.onnx.branches.views import (
    Columns,
    Views,
    find_columns,
    find_input_fault,
    find_norm,
    find_quantizer,
    find_readers,
    find_rows,
    find_shape,
    find_turn,
    is_linear,
    joined,
    make_bias,
)
from swin_quant.backends.onnx.branches.walk import (
    BranchStep,
    BranchWalk,
    find_constant,
    find_owner,
    layer_scale,
    linear,
    norm,
    sides,
)
from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.swin.int8_operators import NormAndLinears, find_fault
from swin_quant.models.placement import MATMULS, name_operation
from swin_quant.operators.plugins import FAST_HEADS, plugged

NO_ATTENTION = "is not among all tokens, between a norm and an addition"
token_branch = plugged("token_branch")


class OperatorTokenBranch(NormAndLinears):
    """The norm, attention and addition of a block as one operator: float32 [B, T, C] -> [B, T, C].

    x + proj(attention(qkv(norm(x)))) among all tokens of a picture; with `norm_last` the norm is behind `proj`. Its
    constants: as in `WindowConstants`, from the norm to proj, and those of the words in `parts`, in this order. bias:
    position biases [heads, P] and which of them two tokens have, int32 [T, T]; layer_norm: weight and bias of q's norm
    in each head, and of k's, [4, depth]; rotary: factors of a channel of q and k, and of the one half a head away, [2,
    T, depth]. `scales`: of q, k, v, and of the softmax if it is rounded to int8.
    """

    operator = "token_branch"

    def __init__(
        self,
        norm: nn.Module,
        norm_last: bool,
        qkv: Linear,
        proj: Linear,
        heads: int,
        scales: list[float],
        parts: Mapping[str, Sequence[Tensor]],
    ) -> None:
        super().__init__(norm, norm_last, qkv=qkv, proj=proj)
        self.heads, self.scales, self.parts = heads, scales, {"parts": " ".join(parts)} if parts else {}
        self.own = nn.ParameterList(nn.Parameter(one, False) for part in parts.values() for one in part)

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        how = self.attributes | self.parts
        return token_branch(x, *self.constants(*self.own), **how, heads=self.heads, scales=self.scales)


@dataclass(frozen=True)
class Operand:
    """q, k or v of all heads.

    `columns`: which outputs of the linear `layer` are the channels [heads, depth]. They are normalised, with weight and
    bias `norm` [2, depth], rotated by `table`, and multiplied by `factor`, before `pair` rounds them. `order`: where
    they stood in their product.
    """

    layer: Linear
    columns: Tensor
    factor: float
    pair: nn.Module
    order: Tensor
    norm: Tensor | None
    epsilon: float | None
    table: Tensor | None


@dataclass(frozen=True)
class TokenBranch:
    """An attention branch: the addition that ends it, the stream that it reads, and its parts.

    `rows`: which channel of proj's input each channel of a head is. `logit_factor`: the factor of q k^T. `bias`: what
    it has added, [heads, T, T]. `tokens`: their number, no integer if any number will do; None: they are no [B, T, C].
    """

    addition: fx.Node
    stream: fx.Node
    owner: str
    norm: nn.LayerNorm
    norm_last: bool
    proj: Linear
    scale: Tensor | None
    operands: tuple[Operand, Operand, Operand]
    softmax: nn.Module | None
    rows: Tensor
    logit_factor: float
    bias: Tensor | None
    tokens: Any

    @property
    def form(self) -> tuple[object, ...]:
        return self.norm_last, isinstance(self.softmax, Pair), *self.parts

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """The constants of each word in the operator's `parts`."""
        q, k, _ = self.operands
        found: dict[str, tuple[Tensor, ...]] = {}
        if self.bias is not None:
            table, index = self.bias.flatten(1).unique(dim=1, return_inverse=True)
            found["bias"] = (table, index.view(self.bias.shape[1:]).int())
        if q.norm is not None and k.norm is not None:
            norms = torch.cat([q.norm * (q.factor * self.logit_factor), k.norm * k.factor])
            found["layer_norm"] = (norms,)
        if q.table is not None:
            found["rotary"] = (q.table,)
        return found

    @property
    def fault(self) -> str | None:
        """The reason why the operator cannot compute it; None if it can."""
        pairs = [*(one.pair for one in self.operands), self.proj._input_quantizer]
        if self.softmax is not None and not isinstance(self.softmax, nn.Identity):
            pairs.append(self.softmax)
        if any(not isinstance(x, Pair) or x.zero_point is not None or x.offset or x.format != "int8" for x in pairs):
            return "has a float node or a zero point: choose ‹policy› cpu-operators"
        layers: set[Any] = {one.layer for one in self.operands}
        if fault := next(filter(None, map(find_fault, (*layers, self.proj))), None):
            return fault
        if fault := find_input_fault(layers):
            return fault
        width = self.norm.normalized_shape[0]
        if self.rows.numel() != width or any(one.columns.shape != self.rows.shape for one in self.operands):
            return "changes its width"
        if any(one.factor <= 0 for one in self.operands) or self.logit_factor <= 0 or self.tokens is None:
            return "has a factor below zero, or no tokens [B, T, C]"
        q, k, v = self.operands
        if not isinstance(self.tokens, int) and (self.bias is not None or q.table is not None):
            return "has positions in its attention for pictures of any size"
        if v.norm is not None or v.table is not None or q.epsilon != k.epsilon or not torch.equal(q.order, k.order):
            return "changes q, k and v in different ways"
        if q.epsilon not in (None, self.norm.eps):
            return "normalises q with another epsilon than its tokens"
        tables = [one for one in (q.table, k.table) if one is not None]
        if tables and (len(tables) < 2 or not torch.allclose(tables[0], tables[1], atol=1e-6)):
            return "rotates q in another way than k"
        return None if self.norm_last else find_scale_fault(self.proj, self.scale)

    @property
    def is_fast(self) -> bool:
        return isinstance(self.tokens, int) and self.tokens <= FAST_HEADS.get(self.rows.shape[1], 0)

    def operator(self) -> nn.Module:
        """The module that computes it, with the layer scale in its last part. The parts are used up."""
        q, k, v = self.operands
        scales = [float(one.pair.scale) for one in self.operands]  # type: ignore[arg-type]  # pairs have one
        scales[0] *= self.logit_factor
        if isinstance(self.softmax, Pair):
            scales.append(float(self.softmax.scale))
        factors = (q.factor * self.logit_factor, k.factor) if q.norm is None else (1.0, 1.0)  # norms have them
        parts = zip(self.operands, (*factors, v.factor), strict=True)
        qkv = joined([Columns(one.layer, one.columns.flatten(), factor) for one, factor in parts])
        weight = self.proj._weight_quantizer
        weight.values = weight.values[self.rows.flatten()].contiguous()
        norm = fold_scale(self, self.proj)
        return OperatorTokenBranch(norm, self.norm_last, qkv, self.proj, len(self.rows), scales, self.parts)


def attentions(root: nn.Module, graph: fx.Graph) -> Counter[str]:
    """The softmaxes in a graph that a product reads: attentions of any kind."""
    found = (
        name_operation(node, root) == "softmax" and any(_is_product(one, root) for one in find_readers(node, root))
        for node in graph.nodes
    )
    return Counter({NO_ATTENTION: sum(found)})


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
            parts, source = found
            ahead = ([], source) if norm_last else walk.along((norm,), source)
            if ahead is None or not walk.is_same(ahead[1], stream):
                continue
            (normed,) = own or ahead[0]
            return TokenBranch(addition, ahead[1], find_owner(proj, root), normed, norm_last, proj, scale, **parts)
    return None


def _attention(walk: BranchWalk, node: fx.Node) -> tuple[dict[str, Any], fx.Node] | None:
    """The parts of a `TokenBranch` that the input of proj is made of, and the value that the linears of q, k and v
    read."""
    result = Views(walk, node, _is_product)
    if result.source is None or result.factor != 1 or result.turns or result.norm or isinstance(result.pair, Pair):
        return None
    shares, value = result.source.args[:2]
    softmax = walk.up(shares)  # type: ignore[arg-type]  # nodes
    rounded = find_quantizer(softmax, walk.root) if softmax is not None else None
    if rounded is not None and softmax is not None:
        softmax = walk.up(softmax.args[0])  # type: ignore[arg-type]
    if softmax is None or name_operation(softmax, walk.root) != "softmax":
        return None
    is_module = softmax.op == "call_module"
    dim: Any = getattr(walk.root.get_submodule(str(softmax.target)), "dim", None) if is_module else softmax.args[1]
    if dim != -1 and ("val" not in softmax.meta or dim != softmax.meta["val"].dim() - 1):  # not over keys
        return None
    added, before = _bias(walk, softmax.args[0])
    logits = Views(walk, before, _is_product)
    if logits.source is None or logits.moves or logits.turns or logits.norm or isinstance(logits.pair, Pair):
        return None
    found = [Views(walk, cast(fx.Node, one), is_linear) for one in (*logits.source.args[:2], value)]
    if any(one.source is None or one.pair is None for one in found):
        return None
    layers = [linear(walk, one.source) for one in found if one.source is not None]
    steps = [one for one in layers if one is not None]
    if len(steps) < 3 or len({one.before for one in steps}) > 1 or not walk.is_closed():
        return None
    source = result.source
    rows = find_rows(result.numbers(find_shape(source)), find_shape(source))
    operands = [_operand(one, step, one is found[1]) for one, step in zip(found, steps, strict=True)]
    q, k, v = operands
    if rows is None or not q or not k or not v or any(one.columns.shape[0] != len(rows) for one in (q, k, v)):
        return None
    shape = found[0].numbers(find_shape(found[0].source)).shape[:-1]
    bias = None if added is None else make_bias(added, (*shape, shape[-1]))
    if added is not None and bias is None:
        return None
    value = cast(fx.Node, found[0].source).meta["val"]
    tokens = value.shape[1] if value.dim() == 3 else None
    parts = {"operands": (q, k, v), "softmax": rounded, "rows": rows, "tokens": tokens}
    return parts | {"logit_factor": logits.factor, "bias": bias}, steps[0].before


def _operand(views: Views, step: BranchStep, is_key: bool) -> Operand | None:
    """One of q, k and v, from its linear on; None if it is written in another way."""
    shape = find_shape(views.source)
    columns = None
    for side in range(2 if views.turns else 1):  # of a rotation's sums, where channels stand where they came from
        numbers = views.numbers(shape, side)
        if (columns := find_columns(numbers.mT if is_key else numbers, step)) is not None:
            break
    turn = find_turn(views, shape, columns, is_key) if columns is not None and views.turns else None
    norm = find_norm(views, side, is_key) if views.norm is not None else None
    if columns is None or (views.turns and turn is None) or (views.norm is not None and norm is None):
        return None
    order = turn.order if turn else torch.arange(columns.shape[1])
    part, places = norm or (None, order)
    norms = torch.stack([part.weight, part.bias]).detach()[:, places[order]] if part else None
    pair = cast(nn.Module, views.pair)
    epsilon, table = (part.eps if part else None), (turn.table if turn else None)
    return Operand(step.found, columns[:, order], views.factor, pair, order, norms, epsilon, table)


def _bias(walk: BranchWalk, node: Any) -> tuple[Tensor | None, Any]:
    """A constant that is added to logits, if there is one, and what it is added to."""
    there = walk.up(node)
    for value, added in sides(there, walk.root) if there is not None else []:
        if (found := find_constant(added, walk.root)) is not None:
            return found, value
    return None, node
