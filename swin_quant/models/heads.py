"""Heads of attention in a captured graph that can be turned (`quant.passes.places.Turn`).

Between its products a network may cut, turn and stack its tensors as it likes: these operations run on the numbers of
values, which shows where each channel of a head goes. Nothing but products inside heads may read the channels.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from swin_quant.models.placement import MATMULS, SIZES, word_of
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes.places import Part, Turn
from swin_quant.quant.quantizer import Quantizer

_KEEPING = frozenset("identity dropout droppath contiguous clone".split())
_VIEWS = frozenset(
    "flatten unflatten reshape view permute transpose t mt movedim swapaxes squeeze unsqueeze getitem select slice "
    "narrow unbind split splitwithsizes chunk roll".split()
)


class _Read(NamedTuple):
    """Values of a source, by their `numbers` in it, as input `position` of the operation `by`."""

    by: fx.Node
    position: int
    numbers: Tensor


def turns(graph: fx.Graph, root: nn.Module) -> Iterator[Turn]:
    """The turns of a graph whose layers are ours. Layers with parameters that others read stay as they are."""
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    own = dict(root.named_parameters())
    operands: dict[fx.Node, dict[int, tuple[str, _Read]]] = {}
    for node in graph.nodes:
        name = str(node.target)
        layer = root.get_submodule(name) if node.op == "call_module" else None
        if calls[name] == 1 and _is_free(layer, name, own):
            for read in _alone(list(_reads(node, _numbers(node), root)), len(layer.weight)):  # type: ignore[union-attr]
                if word_of(read.by, root) in MATMULS:
                    operands.setdefault(read.by, {})[read.position] = name, read
    for product, sides in operands.items():
        if len(sides) == 2 and (found := _contracted(sides, own)):
            yield found
        elif 1 in sides and (found := _carried(product, *sides[1], root, own, calls)):
            yield found


def _is_free(layer: nn.Module | None, name: str, own: dict[str, nn.Parameter]) -> bool:
    """Whether a layer is a linear whose parameters it alone has."""
    if not isinstance(layer, QuantizedLayer) or not isinstance(layer, nn.Linear) or layer.shared_parameters:
        return False
    return f"{name}.weight" in own and (layer.bias is None or f"{name}.bias" in own)


def _numbers(node: fx.Node) -> Tensor:
    shape = torch.Size(map(_size, node.meta["val"].shape))
    return torch.arange(shape.numel()).view(shape)


def _size(extent: Any) -> int:
    """An extent's value for the pictures of the capture."""
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)


def _reads(node: fx.Node, numbers: Any, root: nn.Module) -> Iterator[_Read]:
    """The operations that read the values of a node, behind those that move them or multiply all by one number."""
    for user in node.users:
        word, others = word_of(user, root), [one for one in user.all_input_nodes if one is not node]
        scales = word in ("mul", "div") and user.args[0] is node and not others
        if scales or word in _KEEPING or _is_quantizer(user, root):
            yield from _reads(user, numbers, root)
        elif word in _VIEWS and not any(isinstance(one.meta.get("val"), Tensor) for one in others):
            args: Any = fx.map_arg(user.args, lambda one: numbers if one is node else _size(one.meta["val"]))
            yield from _reads(user, user.target(*args, **user.kwargs), root)  # type: ignore[operator]
        elif word not in SIZES:
            position = user.args.index(node) if node in user.args else -1
            yield _Read(user, position, numbers)


def _is_quantizer(node: fx.Node, root: nn.Module) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Quantizer)


def _alone(reads: list[_Read], channels: int) -> Iterator[_Read]:
    """The reads of channels that no other operation reads."""
    if not all(isinstance(read.numbers, Tensor) for read in reads):
        return
    each = [(read.numbers.flatten() % channels).unique() for read in reads]
    counts = torch.zeros(channels, dtype=torch.int64)
    for some in each:
        counts[some] += 1
    yield from (read for read, some in zip(reads, each, strict=True) if bool((counts[some] == 1).all()))


def _contracted(sides: dict[int, tuple[str, _Read]], own: dict[str, nn.Parameter]) -> Turn | None:
    """q and k: the channels of a head are summed up in the product."""
    (q, one), (k, other) = sides[0], sides[1]
    depth = one.numbers.shape[-1]
    left = _rows(q, one.numbers, own)
    right = _rows(k, other.numbers.transpose(-2, -1), own) if other.numbers.dim() > 1 else None
    return Turn((*left[0], *right[0]), left[1]) if left and right and depth > 1 else None


def _carried(
    product: fx.Node, name: str, read: _Read, root: nn.Module, own: dict[str, nn.Parameter], calls: Counter[str]
) -> Turn | None:
    """v: the product keeps the channels of a head, and proj reads them."""
    depth, found = read.numbers.shape[-1], _rows(name, read.numbers, own)
    if found is None or depth == 1:
        return None
    after = []
    for one in _reads(product, _numbers(product), root):
        reader = str(one.by.target)
        layer = root.get_submodule(reader) if one.by.op == "call_module" else None
        whole = isinstance(one.numbers, Tensor) and one.numbers.shape[-1] % depth == 0
        if not whole or calls[reader] != 1 or not _is_free(layer, reader, own):
            return None
        if _starts(one.numbers.unflatten(-1, (-1, depth))) is None:
            return None
        after.append(Part(f"{reader}.weight", dim=1))
    return Turn((*found[0], *after), found[1]) if after else None


def _starts(numbers: Tensor) -> Tensor | None:
    """The first numbers [rows] of whole heads [..., depth]; None if these are cut or turned otherwise."""
    depth = numbers.shape[-1]
    rows = numbers.reshape(-1, depth)
    is_whole = torch.equal(rows, rows[:, :1] + torch.arange(depth)) and bool((rows[:, 0] % depth == 0).all())
    return rows[:, 0] if is_whole else None


def _rows(name: str, numbers: Tensor, own: dict[str, nn.Parameter]) -> tuple[list[Part], int] | None:
    """The parts of the linear `name` that give heads [..., depth], and the number of heads; None if they are no equal
    part of its outputs."""
    channels, depth = len(own[f"{name}.weight"]), numbers.shape[-1]
    starts = _starts(numbers) if channels % depth == 0 else None
    if starts is None:
        return None
    heads = (starts % channels // depth).unique()
    first, count = int(heads[0]), len(heads)
    if int(heads[-1]) != first + count - 1 or first % count or channels % (count * depth):
        return None
    kinds = [f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in own]
    return [Part(kind, 0, first // count, channels // (count * depth)) for kind in kinds], count
