"""Walks up the graph of a captured network from an addition, step by step along a pattern, for branches of blocks."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from swin_quant.backends.onnx.layers import Linear
from swin_quant.models.captured import STILL
from swin_quant.models.placement import ADDS, SIZES, name_operation

LINEARS = frozenset({"linear", "quantlinear"})
_LAYER_NORM = frozenset({"layernorm", "layernormfp32"})  # others permute maps


class BranchStep(NamedTuple):
    """A part of the network, or a value, that a step found, and the node before it."""

    found: Any
    before: fx.Node


class BranchWalk:
    """A walk from a node up to the values that it is computed from.

    `inside`: the nodes that it passed. A value that others read as well ends it: a branch that is computed elsewhere
    would hide that value.
    """

    def __init__(self, root: nn.Module, start: fx.Node) -> None:
        self.root, self.start, self.inside = root, start, {start}
        self.calls = Counter(str(node.target) for node in start.graph.nodes if node.op == "call_module")

    def part(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if nothing else calls it."""
        is_own = node.op == "call_module" and self.calls[str(node.target)] == 1
        return self.root.get_submodule(str(node.target)) if is_own else None

    def enter(self, node: fx.Node) -> bool:
        """Pass a node; False if a node outside reads its values, unless it is the first one."""
        if node is self.start:
            return True
        readers = (one for one in node.users if one not in self.inside and name_operation(one, self.root) not in SIZES)
        if next(readers, None) is not None:
            return False
        self.inside.add(node)
        return True

    def is_closed(self) -> bool:
        """Whether only nodes inside read the values of those inside, but for the first one's."""
        return all(map(self.enter, list(self.inside)))

    def up(self, node: fx.Node) -> fx.Node | None:
        """The node that computes a value, behind those that keep it; None if others read it."""
        while self.enter(node):
            if not self.keeps(node):
                return node
            node = node.args[0]  # type: ignore[assignment]  # its only input
        return None

    def keeps(self, node: fx.Node) -> bool:
        """Whether a node gives its input unchanged."""
        return name_operation(node, self.root) in STILL

    def along(self, steps: Sequence["Find"], node: fx.Node) -> tuple[list[Any], fx.Node] | None:
        """What each step finds from `node` up, and the value before them; None where one finds nothing."""
        found = []
        for step in steps:
            there = self.up(node)
            made = step(self, there) if there is not None and there.args else None  # a picture or parameter has none
            if made is None:
                return None
            found.append(made.found)
            node = made.before
        return found, node

    def is_same(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes have one value."""
        return self._origin(node) is self._origin(other)

    def _origin(self, node: fx.Node) -> fx.Node:
        while self.keeps(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node


def find_size(extent: Any) -> int:
    """An extent, for the pictures of the capture."""
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)


@torch.no_grad()
def find_constant(node: Any, root: nn.Module) -> Any:
    """The value of a node that no picture changes; None if one does."""
    known: dict[fx.Node, Any] = {}

    def compute(one: fx.Node) -> Any:
        if one.op == "get_attr":
            owner, _, own = str(one.target).rpartition(".")
            return getattr(root.get_submodule(owner), own)
        value = one.meta.get("val")
        if name_operation(one, root) in SIZES or not isinstance(value, Tensor | list | tuple):
            return find_size(value)
        if one not in known:
            args, kwargs = fx.map_arg((one.args, one.kwargs), compute)
            run: Any = root.get_submodule(str(one.target)) if one.op == "call_module" else one.target
            known[one] = run(*args, **kwargs)
        return known[one]

    is_one = isinstance(node, fx.Node) and node.op != "placeholder" and node.meta.get("depends") is False
    return compute(node) if is_one else None


Find = Callable[[BranchWalk, fx.Node], BranchStep | None]


def sides(addition: fx.Node, root: nn.Module) -> list[tuple[fx.Node, fx.Node]]:
    """A branch and the stream that it is added to, in both orders; none for another node than an addition."""
    if name_operation(addition, root) not in ADDS or addition.kwargs or len(addition.args) != 2:
        return []
    left, right = addition.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    return [(right, left), (left, right)]


def find_owner(last: nn.Module, root: nn.Module) -> str:
    """The module that holds the last part of a branch."""
    return next(name for name, part in root.named_modules() if part is last).rpartition(".")[0]


def linear(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """A lowered linear."""
    part = walk.part(node)
    return BranchStep(part, node.args[0]) if isinstance(part, Linear) else None  # type: ignore[arg-type]  # its only input


def any_linear(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """A linear, lowered or not, also one that is called several times."""
    return BranchStep(None, node.args[0]) if name_operation(node, walk.root) in LINEARS else None  # type: ignore[arg-type]


def norm(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """A layer norm of channels with weight and bias."""
    part = walk.part(node)
    if not isinstance(part, nn.LayerNorm) or name_operation(node, walk.root) not in _LAYER_NORM:
        return None
    is_affine = len(part.normalized_shape) == 1 and part.weight is not None and part.bias is not None
    return BranchStep(part, node.args[0]) if is_affine else None  # type: ignore[arg-type]  # its only input


def layer_scale(walk: BranchWalk, node: fx.Node) -> BranchStep | None:
    """A factor [C] for each channel, if there is one."""
    if name_operation(node, walk.root) != "mul" or len(node.args) != 2:
        return BranchStep(None, node)
    for factor, value in (node.args, node.args[::-1]):
        if isinstance(factor, fx.Node) and isinstance(value, fx.Node) and factor.op == "get_attr":
            owner, _, own = str(factor.target).rpartition(".")
            held: Tensor = getattr(walk.root.get_submodule(owner), own)
            return BranchStep(held.detach(), value) if held.dim() == 1 else None
    return None
