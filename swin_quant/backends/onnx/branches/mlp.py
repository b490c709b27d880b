"""MLP branches of a captured network: a norm, a linear, an activation, a linear, a layer scale, and the addition.

The activation may be that of a gate, which another linear's values are multiplied by.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from swin_quant.backends.onnx.branches.views import (
    Columns,
    Views,
    depending,
    find_input_fault,
    find_part,
    is_linear,
    joined,
)
from swin_quant.backends.onnx.branches.walk import (
    LINEARS,
    BranchStep,
    BranchWalk,
    Find,
    any_linear,
    find_owner,
    layer_scale,
    linear,
    norm,
    sides,
)
from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.swin.int8_operators import OperatorMlp, find_fault, is_fast_mlp
from swin_quant.models.placement import AVERAGES, ONE_SIDED, name_operation

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_SIGMOIDS = {1.702: "quick_gelu", 1: "silu"}


def activation(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """One that the operator has (plugins/openvino/activation.hpp), by its name."""
    word, value = name_operation(node, walk.root), node.args[0]
    if word in ("relu", "silu", "gelu") and isinstance(value, fx.Node):
        part = walk.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        given: list[Any] = [*node.args[1:], *node.kwargs.values(), "none"]
        how = getattr(part, "approximate", "none") if part else given[0]
        return BranchStep(_GELUS[how] if word == "gelu" else word, value) if word != "gelu" or how in _GELUS else None
    for value, sigmoid in (node.args, node.args[::-1]) if word == "mul" else ():  # x sigmoid(a x)
        if not isinstance(sigmoid, fx.Node) or name_operation(sigmoid, walk.root) != "sigmoid":
            continue
        if not walk.enter(sigmoid):
            continue
        inner, factor = sigmoid.args[0], 1.0
        if isinstance(inner, fx.Node) and name_operation(inner, walk.root) == "mul" and walk.enter(inner):
            inner, factor = sorted(inner.args, key=lambda one: not isinstance(one, fx.Node))  # type: ignore[assignment]
        if inner is value and isinstance(value, fx.Node) and factor in _SIGMOIDS:
            return BranchStep(_SIGMOIDS[factor], value)
    return None


class Hidden(NamedTuple):
    """What the last linear takes: an activation of the first `part`'s values, times those of the second, if there."""

    activation: str
    parts: tuple["Columns", ...]


def hidden(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """An activation of a linear, or a gate."""
    if step := activation(walk, node):
        there = walk.up(step.before)
        made = linear(walk, there) if there is not None and there.args else None
        if made is not None:
            columns = torch.arange(made.found._weight_quantizer.values.shape[1])
            return BranchStep(Hidden(step.found, (Columns(made.found, columns),)), made.before)
    for gate, value in _gates(walk, node):
        views = [Views(walk, one, is_linear) for one in (gate.before, value)]
        steps = [linear(walk, one.source) for one in views if one.source is not None]
        if len(steps) < 2 or any(one.factor != 1 or one.pair or one.norm or one.turns for one in views):
            continue
        first, second = steps
        parts = [find_part(one, step) for one, step in zip(views, steps, strict=True)]
        if first and second and first.before is second.before and all(parts) and walk.is_closed():
            return BranchStep(Hidden(gate.found, tuple(one for one in parts if one)), first.before)
    return None


def _gates(walk: BranchWalk, node: fx.Node) -> Iterator[tuple[BranchStep, fx.Node]]:
    """The activation of a gate and what is multiplied by it, in both orders."""
    if name_operation(node, walk.root) == "mul" and len(node.args) == 2:
        for gate, value in (node.args, node.args[::-1]):
            there = walk.up(gate) if isinstance(gate, fx.Node) and isinstance(value, fx.Node) else None
            step = activation(walk, there) if there is not None and there.args else None
            if step is not None:
                yield step, value  # type: ignore[misc]  # a node, as checked


# Whether the norm is last -> the steps from the addition up.
PATTERNS: dict[bool, tuple[Find, ...]] = {
    False: (layer_scale, linear, hidden, norm),
    True: (layer_scale, norm, linear, hidden),
}
NO_MLP = "is not between a norm and an addition, or others read its values"
# Why no operator computes what looks like an MLP, by its layers from the last one up (`find_letter`)
LIKE = {"has a convolution between its linears": ("LACL", "LCAL"), "is made of 1 x 1 convolutions": ("PAPN",)}
_MAP_NORMS = frozenset({"groupnorm", "layernorm2d", "layernorm2dnobias"})


@dataclass(frozen=True)
class MlpBranch:
    """An MLP branch: the addition that ends it, the stream that it reads, and its parts."""

    addition: fx.Node
    stream: fx.Node
    owner: str
    norm: nn.LayerNorm
    norm_last: bool
    hidden: Hidden
    fc2: Linear
    scale: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        return self.norm_last, self.hidden.activation, len(self.hidden.parts)

    @property
    def fault(self) -> str | None:
        """The reason why the operator cannot compute it; None if it can."""
        layers = [one.layer for one in self.hidden.parts]
        if fault := next(filter(None, map(find_fault, (*layers, self.fc2))), None):
            return fault
        width = self.norm.normalized_shape[0]
        size = self.fc2._weight_quantizer.values.shape[0]
        shapes = {(one.layer._weight_quantizer.values.shape[0], len(one.columns)) for one in self.hidden.parts}
        if shapes != {(width, size)} or self.fc2._weight_quantizer.values.shape[1] != width:
            return "changes its width"
        if self.scale is not None and len(self.scale) != width:
            return "changes its width"
        return find_input_fault(layers) or (None if self.norm_last else find_scale_fault(self.fc2, self.scale))

    @property
    def is_fast(self) -> bool:
        return is_fast_mlp(*self.fc2._weight_quantizer.values.shape[::-1])

    def operator(self) -> nn.Module:
        """The module that computes it, with the layer scale in its last part. The parts are used up."""
        norm, fc1 = fold_scale(self, self.fc2), joined(self.hidden.parts)
        return OperatorMlp(norm, self.norm_last, fc1, self.fc2, self.hidden.activation)


def mlp_branch(root: nn.Module, addition: fx.Node) -> MlpBranch | None:
    """The MLP branch that ends in an addition; None if it is none."""
    for branch, stream in sides(addition, root):
        for norm_last, steps in PATTERNS.items():
            walk = BranchWalk(root, addition)
            made = walk.along(steps, branch)
            if made is None or not walk.is_same(made[1], stream):
                continue
            scale, *parts = made[0]
            fc2, inner, own = parts[1:] + parts[:1] if norm_last else parts
            return MlpBranch(addition, made[1], find_owner(fc2, root), own, norm_last, inner, fc2, scale)
    return None


def mlps(root: nn.Module, graph: fx.Graph) -> Counter[str]:
    """The MLPs in a graph, whatever stands around them: an activation or a gate before a linear, or `LIKE` one."""

    def is_mlp(node: fx.Node) -> bool:
        walk = BranchWalk(root, node)
        there = walk.up(last.before) if (last := any_linear(walk, node)) else None
        if there is None:
            return False
        return walk.along((activation, any_linear), there) is not None or next(_gates(walk, there), None) is not None

    above = [_find_letters(node, root) for node in graph.nodes]
    like = Counter(why for letters in above for why, forms in LIKE.items() if letters.startswith(forms))
    return Counter({NO_MLP: sum(map(is_mlp, graph.nodes))}) + like


def _find_letters(node: fx.Node, root: nn.Module) -> str:
    """The letters of a layer and of those above it, four in all, as far as each value is computed from one other."""
    found = find_letter(node, root)
    while 0 < len(found) < 4 and len(before := depending(node)) == 1:
        (node,) = before
        found += find_letter(node, root)
    return found


def find_letter(node: fx.Node, root: nn.Module) -> str:
    """L: a linear, P: a convolution of 1 x 1, C: of more, A: an activation, N: a norm, M: a mean; else nothing."""
    word = name_operation(node, root)
    part: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    stored = getattr(part, "_weight_quantizer", None)
    weight = getattr(stored, "values", getattr(part, "weight", None))
    if isinstance(weight, Tensor) and weight.dim() == 4:
        return "P" if weight.shape[2:].numel() == 1 else "C"
    kinds = {"L": LINEARS, "A": ONE_SIDED, "M": AVERAGES, "N": _MAP_NORMS}
    return next((letter for letter, words in kinds.items() if word in words), "")


def find_scale_fault(layer: Linear, factors: Tensor | None) -> str | None:
    """The reason why int8 weights cannot hold a layer scale; None if they can."""
    if factors is None or not ((layer._weight_quantizer.values == -128) & (factors < 0)).any():  # it has no opposite
        return None
    return "has weights of -128 where its layer scale is below zero"


def fold_scale(branch: Any, layer: Linear) -> nn.LayerNorm:
    """Fold a branch's layer scale into its last part: its norm, or else the linear `layer`. Returns the norm."""
    norm, factors = branch.norm, branch.scale
    if factors is None:
        return norm
    if branch.norm_last:
        made = nn.LayerNorm(norm.normalized_shape, norm.eps)
        made.weight = nn.Parameter(norm.weight * factors, requires_grad=False)
        made.bias = nn.Parameter(norm.bias * factors, requires_grad=False)
        return made
    weight, sign = layer._weight_quantizer, factors.sign().to(torch.int8)
    weight.values = weight.values * sign
    layer.scale_outputs(torch.where(sign == 0, 1.0, factors.abs()))  # scales of weights stay above zero
    layer.bias = None if layer.bias is None else layer.bias * sign
    return norm
