"""Operations between products: they cut, turn and stack tensors.

They run on the numbers of the values, which shows where each channel of a head comes from, however it is written.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from swin_quant.backends.onnx.branches.walk import BranchWalk, find_constant, find_size, norm
from swin_quant.backends.onnx.layers import Linear
from swin_quant.models.placement import name_operation

_VIEWS = frozenset(
    "flatten unflatten reshape view permute transpose t movedim swapaxes squeeze unsqueeze getitem select slice unbind "
    "split splitwithsizes chunk contiguous clone identity dropout".split()
)
_FACTORS = frozenset({"mul", "div"})
_SUMS = frozenset({"add", "sub"})
_TURNS = frozenset({"neg", "cat", "concat", "stack"}) | _SUMS  # a rotation is made of these, and of constant factors
_PICTURES = 2  # that the graph was captured with


def find_quantizer(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The quantizer that a node calls; None if it calls none."""
    is_one = node.op == "call_module" and str(node.target).endswith("_input_quantizer")
    return root.get_submodule(str(node.target)) if is_one else None


def find_readers(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """The operations that read a value, behind those that keep it."""
    found = []
    for user in node.users:
        is_passed = name_operation(user, root) in _VIEWS or isinstance(find_quantizer(user, root), nn.Module)
        found += find_readers(user, root) if is_passed else [user]
    return found


def find_shape(node: fx.Node | None) -> tuple[int, ...]:
    """The shape of a node's output, for the pictures of the capture."""
    return tuple(map(find_size, node.meta["val"].shape)) if node is not None else ()


class Columns(NamedTuple):
    """Outputs of a linear, by number, multiplied by a factor."""

    layer: Linear
    columns: Tensor
    factor: float = 1.0


def joined(parts: Sequence[Columns]) -> Linear:
    """One linear to the outputs of all `parts`, side by side. The first one's linear becomes it."""
    found = []
    for layer, columns, factor in parts:
        weight: Any = layer._weight_quantizer
        scale = weight.scale.expand(weight.values.shape[1])[columns] * factor
        bias = torch.zeros_like(scale) if layer.bias is None else layer.bias[columns] * factor
        found.append((weight.values[:, columns], scale, bias))
    first = parts[0].layer
    values, scales, biases = zip(*found, strict=True)
    first._weight_quantizer.values = torch.cat(values, 1).contiguous()
    first._weight_quantizer.scale, first.bias = torch.cat(scales), torch.cat(biases)
    return first


def find_input_fault(layers: Iterable[Linear]) -> str | None:
    """The reason why linears cannot be joined; None if they take the same levels."""
    inputs = {(float(one._input_quantizer.scale), one._input_quantizer.zero_point) for one in layers}  # type: ignore[arg-type]
    return "rounds its tokens in several ways" if len(inputs) > 1 else None


def is_linear(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node calls a lowered linear."""
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Linear)


class Views:
    """The operations from a value up to its `source`: they move, and multiply by one number, `factor`.

    `source`: None if there is another operation. `norm`: the node that normalises each head; `turns`: whether each is
    rotated behind it. The caller refuses both where they cannot be. Values that others read as well end the walk
    (`BranchWalk.is_closed`).
    """

    def __init__(self, walk: BranchWalk, node: fx.Node, is_source: Callable[[fx.Node, nn.Module], bool]) -> None:
        self.walk, self.value, self.is_source = walk, node, is_source
        self.factor, self.moves, self.turns = 1.0, False, False
        self.pair: nn.Module | None = None
        self.norm: fx.Node | None = None
        self._found: dict[tuple[fx.Node, bool], fx.Node | None] = {}
        self._are_below: set[bool] = set()  # whether ways to the source lead through the norm
        self.source = self._find_source(node, False)
        if self.norm is not None and self._are_below != {True}:
            self.source = None

    def _find_source(self, node: Any, is_below: bool) -> fx.Node | None:
        """The source of a value, which `is_below` the norm."""
        if not isinstance(node, fx.Node):
            return None
        if self.is_source(node, self.walk.root):
            self.walk.inside.add(node)
            self._are_below.add(is_below)
            return node
        if (node, is_below) not in self._found:
            before = self._pass(node, is_below)
            self.walk.inside.add(node)
            found = {self._find_source(one, is_below or node is self.norm) for one in before}
            self._found[node, is_below] = found.pop() if len(found) == 1 else None
        return self._found[node, is_below]

    def _pass(self, node: fx.Node, is_below: bool) -> list[fx.Node]:
        """The values before an operation; none if it is no such operation."""
        word, before = name_operation(node, self.walk.root), depending(node)
        quantizer = find_quantizer(node, self.walk.root)
        if quantizer is not None and self.factor == 1 and self.pair is None and not self.turns:
            self.pair = quantizer
        elif self.walk.keeps(node):
            pass
        elif word in _FACTORS and not is_below and isinstance(node.args[1], int | float):
            self.factor *= node.args[1] if word == "mul" else 1 / node.args[1]
        elif word in _VIEWS:
            self.moves = True
        elif (word in _TURNS or (word in _FACTORS and len(before) == 1)) and not is_below:
            self.turns = True
        elif self.norm in (None, node) and not is_below and norm(self.walk, node) is not None:
            self.norm = node
        else:
            return []
        return before

    @torch.no_grad()
    def run(self, given: Tensor, side: int | None = None, source: fx.Node | None = None) -> Any:
        """The value where the source, or the norm as another `source`, gives `given`; norms are left out.

        `side`: of sums that is taken, while factors are left out, so that numbers of values stay numbers.
        """
        known: dict[fx.Node, Any] = {}

        def compute(node: fx.Node) -> Any:
            if node is (source or self.source):
                return given
            if not node.meta.get("depends"):
                is_tensor = node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor | list | tuple)
                found = find_constant(node, self.walk.root) if is_tensor else find_size(node.meta["val"])
                return found.to(given.dtype) if isinstance(found, Tensor) and found.is_floating_point() else found
            if node not in known:
                word, before = name_operation(node, self.walk.root), depending(node)
                if side is not None and word in _SUMS:
                    known[node] = compute(before[min(side, len(before) - 1)])  # a constant is none of them
                elif word in _VIEWS | _TURNS or (side is None and word in _FACTORS):
                    args, kwargs = fx.map_arg((node.args, node.kwargs), compute)
                    is_part = node.op == "call_module"
                    how: Any = self.walk.root.get_submodule(str(node.target)) if is_part else node.target
                    known[node] = how(*args, **kwargs)
                else:
                    known[node] = compute(before[0])
            return known[node]

        return compute(self.value)

    def numbers(self, shape: tuple[int, ...], side: int = 0, source: fx.Node | None = None) -> Tensor:
        """The value, where the source gives the numbers of its values in order; negatives count as positive."""
        numbers = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
        return self.run(numbers, side, source).abs() - 1


def depending(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that the pictures change."""
    return [one for one in node.all_input_nodes if one.meta.get("depends")]


class Turn(NamedTuple):
    """A rotation of heads by the places of their tokens.

    `order`: the channels of a head, so that each is mixed with the one half a head away. `table`: the factors of both,
    [2, T, depth].
    """

    order: Tensor
    table: Tensor


def find_turn(views: Views, shape: tuple[int, ...], columns: Tensor, is_key: bool) -> Turn | None:
    """How an operand [..., T, depth] is rotated, whose channels [heads, depth] are `columns` of its linear [B, T, F].

    None if it is no rotation of pairs that is the same for all heads and pictures.
    """

    def heads(x: Tensor) -> Tensor:
        return (x.mT if is_key else x).flatten(0, -3)

    if len(shape) != 3:
        return None
    own, others = (heads(views.numbers(shape, side))[0] for side in (0, 1))
    mixed = (own != others).any(1).nonzero().flatten().tolist()
    depth = columns.shape[1]
    partner = torch.arange(depth).roll(depth // 2)
    if mixed:  # the side that is not the columns themselves
        channels = [one[mixed[0]] % shape[-1] for one in (others, own)]
        other = channels[int(torch.equal(channels[0], columns[0]))]
        partner = (columns[0][:, None] == other).int().argmax(0)
    lower = (torch.arange(depth) < partner).nonzero().flatten()
    order = torch.cat([lower, partner[lower]])
    if not torch.equal(order.sort()[0], torch.arange(depth)):
        return None
    half, columns = len(lower), columns[:, order]
    probes = torch.zeros(2, *shape, dtype=torch.float64)
    for probe, part in zip(probes, (columns[:, :half], columns[:, half:]), strict=True):
        probe[..., part.flatten()] = 1
    first, second = (heads(views.run(probe))[0][:, order] / views.factor for probe in probes)
    table = torch.stack(
        [torch.cat(one, 1) for one in ((first[:, :half], second[:, half:]), (second[:, :half], first[:, half:]))]
    )
    given = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = given[..., columns].transpose(1, 2).flatten(0, 1)
    wanted = (x * table[0] + x.roll(half, -1) * table[1]) * views.factor
    is_one = torch.allclose(heads(views.run(given))[..., order], wanted, atol=1e-6)
    return Turn(order, table.float()) if is_one else None


def find_norm(views: Views, side: int, is_key: bool) -> tuple[nn.LayerNorm, Tensor] | None:
    """The norm of an operand's heads, and which of its channels theirs are; None if it is another one."""
    part: Any = views.walk.part(views.norm) if views.norm is not None else None
    depth = part.normalized_shape[0]
    numbers = views.numbers(find_shape(views.norm), side, views.norm)
    numbers = (numbers.mT if is_key else numbers).flatten(0, -2)
    is_head = numbers.shape[-1] == depth and torch.equal(numbers // depth, (numbers[:, :1] // depth).expand_as(numbers))
    places = numbers % depth
    return (part, places[0]) if is_head and torch.equal(places, places[:1].expand_as(places)) else None


def make_bias(added: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """What logits of this `shape` have added, [heads, T, T]; None if pictures differ, or a token sees no key."""
    if torch.broadcast_shapes(added.shape, shape) != shape:
        return None
    heads = added.detach().float().expand(shape).flatten(0, -3).unflatten(0, (_PICTURES, -1))
    is_one = torch.equal(heads[0], heads[1]) and bool(heads[0].amax(-1).isfinite().all())
    return heads[0] if is_one else None


def find_columns(numbers: Tensor, layer: Any) -> Tensor | None:
    """Which outputs of a linear, of tokens [B, T, F], are the channels [heads, depth] of an operand [..., T, depth]."""
    outputs = layer.found._weight_quantizer.values.shape[1]
    return _order(numbers.flatten(0, -3), outputs) if numbers.dim() > 2 else None


def find_rows(numbers: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Which channels of proj's input [B, T, C] are those [heads, depth] of a result of this shape, [..., T, depth]."""
    if numbers.dim() != 3 or numbers.numel() != torch.Size(shape).numel() or len(shape) < 3:
        return None
    inverse = numbers.flatten().argsort().view(shape).flatten(0, -3)
    return _order(inverse, numbers.shape[-1])


def find_part(views: Views, step: Any) -> Columns | None:
    """The outputs of a linear that a value [..., T, H] has, cut from its result [..., T, F]."""
    shape = find_shape(views.source)
    numbers = views.numbers(shape).flatten(0, -2)
    places = torch.arange(len(numbers))[:, None] * shape[-1] + numbers[0] % shape[-1]
    return Columns(step.found, numbers[0]) if torch.equal(numbers, places) else None


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
