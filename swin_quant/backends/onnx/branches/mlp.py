"""MLP branches of a captured network: a norm, a linear, an activation, a linear, a layer scale, and the addition."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from swin_quant.backends.onnx.branches.walk import (
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
from swin_quant.backends.onnx.swin.int8_operators import QUICK, OperatorMlp, find_fault, is_fast_mlp
from swin_quant.models.placement import name_operation


def activation(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """One of `ACTIVATIONS`, by its name."""
    word, value = name_operation(node, walk.root), node.args[0]
    if word in ("relu", "silu", "gelu") and isinstance(value, fx.Node):
        part = walk.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        given: list[Any] = [*node.args[1:], *node.kwargs.values(), "none"]
        how = getattr(part, "approximate", "none") if part else given[0]
        return BranchStep(_GELUS[how] if word == "gelu" else word, value) if word != "gelu" or how in _GELUS else None
    return _sigmoid_form(walk, node) if word == "mul" else None


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_SIGMOIDS = {QUICK: "quick_gelu", 1: "silu"}


def _sigmoid_form(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """x sigmoid(a x)."""
    for value, sigmoid in (node.args, node.args[::-1]):
        if (
            not isinstance(sigmoid, fx.Node)
            or name_operation(sigmoid, walk.root) != "sigmoid"
            or not walk.enter(sigmoid)
        ):
            continue
        inner, factor = sigmoid.args[0], 1.0
        if isinstance(inner, fx.Node) and name_operation(inner, walk.root) == "mul" and walk.enter(inner):
            inner, factor = sorted(inner.args, key=lambda one: not isinstance(one, fx.Node))  # type: ignore[assignment]
        if inner is value and isinstance(value, fx.Node) and factor in _SIGMOIDS:
            return BranchStep(_SIGMOIDS[factor], value)
    return None


INNER: tuple[Find, ...] = (linear, activation, linear)
# Whether the norm is last -> the steps from the addition up.
PATTERNS: dict[bool, tuple[Find, ...]] = {
    False: (layer_scale, *INNER, norm),
    True: (layer_scale, norm, *INNER),
}


@dataclass(frozen=True)
class MlpBranch:
    """An MLP branch: the addition that ends it, the stream that it reads, and its parts."""

    addition: fx.Node
    stream: fx.Node
    owner: str
    norm: nn.LayerNorm
    norm_last: bool
    fc1: Linear
    fc2: Linear
    activation: str
    scale: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        return self.norm_last, self.activation

    @property
    def fault(self) -> str | None:
        """The reason why the operator cannot compute it; None if it can."""
        return find_fault(self.fc1) or find_fault(self.fc2) or _find_shape_fault(self)

    @property
    def is_fast(self) -> bool:
        return is_fast_mlp(self.fc1)

    def operator(self) -> nn.Module:
        """The module that computes it, with the layer scale in its last part. The parts are used up."""
        last = self.norm
        if self.scale is not None and self.norm_last:
            last = scaled_norm(self.norm, self.scale)
        elif self.scale is not None:
            scale_outputs(self.fc2, self.scale)
        return OperatorMlp(last, self.norm_last, self.fc1, self.fc2, self.activation)


def mlp_branch(root: nn.Module, addition: fx.Node) -> MlpBranch | None:
    """The MLP branch that ends in an addition; None if it is none."""
    for branch, stream in sides(addition, root):
        for norm_last, steps in PATTERNS.items():
            walk = BranchWalk(root, addition)
            made = walk.along(steps, branch)
            if made is None or not walk.is_same(made[1], stream):
                continue
            scale, *parts = made[0]
            *others, own = parts[1:] + parts[:1] if norm_last else parts
            fc2, name, fc1 = others
            return MlpBranch(addition, made[1], find_owner(fc2, root), own, norm_last, fc1, fc2, name, scale)
    return None


def mlps(root: nn.Module, graph: fx.Graph) -> int:
    """The number of MLPs in a graph, whatever stands around them: two linears with an activation between them."""
    steps = any_linear, activation, any_linear
    return sum(
        BranchWalk(root, node).along(steps, node) is not None
        for node in graph.nodes
        if any_linear(BranchWalk(root, node), node)
    )


def _find_shape_fault(branch: MlpBranch) -> str | None:
    width = branch.norm.normalized_shape[0]
    shapes = [tuple(one._weight_quantizer.values.shape) for one in (branch.fc1, branch.fc2)]
    is_one = shapes[0][0] == width and shapes[1] == shapes[0][::-1]
    if not is_one or (branch.scale is not None and len(branch.scale) != width):
        return "changes its width"
    return None if branch.norm_last else find_scale_fault(branch.fc2, branch.scale)


def find_scale_fault(layer: Linear, factors: Tensor | None) -> str | None:
    """The reason why int8 weights cannot hold a layer scale; None if they can."""
    if factors is None or not ((layer._weight_quantizer.values == _LOWEST) & (factors < 0)).any():
        return None
    return "has weights of -128 where its layer scale is below zero"


_LOWEST = -128  # which has no opposite in int8


def scale_outputs(layer: Linear, factors: Tensor) -> None:
    """Multiply output j by `factors[j]`, of any sign, also 0: scales of weights stay above zero."""
    weight = layer._weight_quantizer
    sign = factors.sign().to(torch.int8)
    weight.values = weight.values * sign
    layer.scale_outputs(torch.where(sign == 0, 1.0, factors.abs()))
    if layer.bias is not None:
        layer.bias = layer.bias * sign


def scaled_norm(norm: nn.LayerNorm, factors: Tensor) -> nn.LayerNorm:
    """A norm whose results are multiplied by factors [C]."""
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.weight = nn.Parameter(norm.weight * factors, requires_grad=False)
    made.bias = nn.Parameter(norm.bias * factors, requires_grad=False)
    return made
