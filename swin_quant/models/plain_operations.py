"""Write operations that nodes or engines do not take by plain ones.

A product with a parameter becomes a linear; any other `einsum` and `baddbmm` become a matrix product with reshapes, so
that their factors get nodes. An average with a window larger than its map, which OpenVINO does not load, becomes a
mean. A squeeze leaves the batch, also of one picture. Sizes and devices come from a nearby tensor.
"""

import operator
import string
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.models.capture import packet

_ATEN = torch.ops.aten


def spell_out(graph: fx.Graph) -> None:
    """Rewrite every product of two tensors without a repeated letter, and averages; any other stays unchanged."""
    for node in list(graph.nodes):
        kind = "avg_pool2d" if isinstance(_module(graph, node), nn.AvgPool2d) else packet(node)
        made = _REWRITES[kind](graph, node) if kind in _REWRITES else None
        if made is not None:
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _baddbmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """added + left @ right."""
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 3:
        return None
    added, left, right = node.args
    with graph.inserting_before(node):
        product = _call(graph, node, _ATEN.bmm.default, left, right)
        return _call(graph, node, _ATEN.add.Tensor, product, added)


def _einsum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """left [batch, rows, summed] @ right [batch, summed, columns], each group of letters flattened; with a parameter,
    and no batch, linear(left [*rows, summed], right [columns, summed]).
    """
    factors = cast(Sequence[fx.Node], node.args[1])
    words, wanted = einsum_words(node)
    if len(factors) != 2 or not wanted or any(len({*word}) < len(word) for word in words):
        return None
    if any(len({*map(str, extents)}) > 1 for extents in einsum_extents(node).values()):  # a broadcast one
        return None
    batch, summed = ([one for one in words[0] if one in words[1] and (one in wanted) is kept] for kept in (True, False))
    pairs = [*zip(factors, words, strict=True)]
    weighted = [
        (given, weight)
        for given, weight in (pairs, pairs[::-1])
        if not batch and given[0].meta["depends"] and _is_weight(graph, weight[0])
    ]
    (x, left), (y, right) = weighted[0] if weighted else pairs
    rows, columns = ([one for one in word if one not in batch + summed] for word in (left, right))
    if not summed or {*batch, *rows, *columns} != {*wanted}:  # a letter of one factor is summed by itself
        return None
    with graph.inserting_before(node):
        sizes = {
            letter: _size(graph, node, factor, dim)
            for factor, word in pairs
            for dim, letter in enumerate(word)
            if letter in wanted
        }
        if weighted:
            function, first = _ATEN.linear.default, _matrix(graph, node, x, left, rows, summed)
            second = _matrix(graph, node, y, right, [], columns, summed)
        else:
            function, first = _ATEN.matmul.default, _matrix(graph, node, x, left, batch, rows, summed)
            second = _matrix(graph, node, y, right, batch, summed, columns)
        product = _call(graph, node, function, first, second)
        order = [*batch, *rows, *columns]
        whole = _call(graph, node, _ATEN.reshape.default, product, [sizes[letter] for letter in order])
        return _call(graph, node, _ATEN.permute.default, whole, [order.index(letter) for letter in wanted])


def einsum_words(node: fx.Node) -> tuple[list[str], str]:
    """The letters of an einsum's factors and of its output, without dots, also where it leaves the output out."""
    equation, factors = str(node.args[0]).replace(" ", ""), cast(Sequence[fx.Node], node.args[1])
    given, arrow, wanted = equation.partition("->")
    words = given.split(",")
    spare = [one for one in string.ascii_letters if one not in equation]
    dots = [factor.meta["val"].dim() - len(word) + 3 for factor, word in zip(factors, words, strict=True)]
    most = max((count for count, word in zip(dots, words, strict=True) if "..." in word), default=0)
    if not arrow:
        once = sorted(one for one in {*given} - {*",."} if given.count(one) == 1)
        wanted = "..." * ("." in given) + "".join(once)
    words = [word.replace("...", "".join(spare[most - count : most])) for word, count in zip(words, dots, strict=True)]
    return words, wanted.replace("...", "".join(spare[:most]))


def einsum_extents(node: fx.Node) -> dict[str, list[Any]]:
    """The extents of each letter of an einsum, in all its factors."""
    found: dict[str, list[Any]] = {}
    for factor, word in zip(cast(Sequence[fx.Node], node.args[1]), einsum_words(node)[0], strict=True):
        for letter, extent in zip(word, factor.meta["val"].shape, strict=True):
            found.setdefault(letter, []).append(extent)
    return found


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """x @ W, and b + x @ W, with a parameter W [in, out]: linear(x, W^T, b)."""
    args: Any = node.args
    bias, (x, weight) = (args[:1], args[1:]) if packet(node) == "addmm" else ((), args)
    is_plain = not {key: value for key, value in node.kwargs.items() if value != 1}  # alpha and beta of addmm
    if not is_plain or not _is_weight(graph, weight) or not x.meta["depends"] or weight.meta["val"].dim() != 2:
        return None
    if x.meta["val"].dim() < 2 or (bias and not (_is_weight(graph, bias[0]) and bias[0].meta["val"].dim() == 1)):
        return None
    with graph.inserting_before(node):
        rows = _call(graph, node, _ATEN.permute.default, weight, [1, 0])
        return _call(graph, node, _ATEN.linear.default, x, rows, *bias)


def _is_weight(graph: fx.Graph, node: Any) -> bool:
    """Whether a node is a parameter, with its dimensions in any order; a fixed table, as of a DFT, is none."""
    while isinstance(node, fx.Node) and packet(node) in ("t", "transpose", "permute", "numpy_T"):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    owner, _, own = str(node.target).rpartition(".")
    return isinstance(getattr(cast(nn.Module, graph.owning_module).get_submodule(owner), own), nn.Parameter)


def _average(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The mean of the whole map, where the window is larger."""
    pool, given = _module(graph, node), cast(fx.Node, node.args[0])
    options = vars(pool) if pool else dict(zip(_AVERAGE, node.args[1:], strict=False)) | node.kwargs
    sizes = given.meta["val"].shape[-2:]
    windows, paddings = (_both(options.get(key, 0)) for key in ("kernel_size", "padding"))
    if any(paddings) or options.get("divisor_override") or not all(isinstance(size, int) for size in sizes):
        return None
    if windows == sizes or any(window < size for window, size in zip(windows, sizes, strict=True)):
        return None
    with graph.inserting_before(node):
        return _call(graph, node, _ATEN.mean.dim, given, [-2, -1], True)


def _squeeze(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Without dimensions whose extent is open, which it would drop from a batch of one alone."""
    given = cast(fx.Node, node.args[0])
    extents = given.meta["val"].shape
    asked = node.args[1] if len(node.args) > 1 else range(len(extents))
    dims = [dim % len(extents) for dim in ([asked] if isinstance(asked, int) else cast(Sequence[int], asked))]
    fixed = [dim for dim in dims if isinstance(extents[dim], int) and extents[dim] == 1]
    if fixed == dims:
        return None
    with graph.inserting_before(node):
        plain = (_ATEN.squeeze.dims, given, fixed) if fixed else (_ATEN.clone.default, given)
        return _call(graph, node, *plain)


def _module(graph: fx.Graph, node: fx.Node) -> nn.Module | None:
    root = cast(nn.Module, graph.owning_module)
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def _both(size: Any) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * (2 // len(sizes))


def _matrix(graph: fx.Graph, at: fx.Node, factor: fx.Node, word: str, *groups: list[str]) -> fx.Node:
    """A factor as [*batch, *groups]: its dimensions in the order of the groups, each but the first one flattened."""
    batch, *last = groups
    order = [word.index(letter) for group in groups for letter in group]
    found = _call(graph, at, _ATEN.permute.default, factor, order)
    for place, group in enumerate(last):
        start = len(batch) + place
        if not group:
            found = _call(graph, at, _ATEN.unsqueeze.default, found, start)
        elif len(group) > 1:
            found = _call(graph, at, _ATEN.flatten.using_ints, found, start, start + len(group) - 1)
    return found


def _size(graph: fx.Graph, at: fx.Node, factor: fx.Node, dim: int) -> Any:
    extent = factor.meta["val"].shape[dim]
    return extent if isinstance(extent, int) else _call(graph, at, _ATEN.sym_size.int, factor, dim)


def _call(graph: fx.Graph, at: fx.Node, function: Any, *args: Any) -> fx.Node:
    """A new operation instead of `at`, with its value without data."""
    made = graph.call_function(function, args)
    values = fx.map_arg(args, lambda one: one.meta["val"])
    value = function(*values)
    depends = isinstance(value, Tensor) and any(one.meta["depends"] for one in made.all_input_nodes)
    made.meta = {key: value for key, value in at.meta.items() if key == "nn_module_stack"}
    made.meta |= {"val": value, "depends": depends}
    return made


_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_REWRITES = {
    "avg_pool2d": _average,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "squeeze": _squeeze,
    **dict.fromkeys(("matmul", "mm", "addmm"), _product),
}


def take_from_nearby(graph: fx.Graph) -> None:
    """Read sizes from the nearest tensor that has them, and make new tensors on the device of the nearest one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        for size in node.all_input_nodes:
            if isinstance(size.meta.get("val"), torch.SymInt):
                node.replace_input_with(size, _nearby_size(graph, size, node))
        if node.kwargs.get("device") is not None and (near := next(_nearest(node), None)) is not None:
            node.kwargs = {**node.kwargs, "device": _inserted(graph, node, None, getattr, near, "device")}
    graph.eliminate_dead_code()


def _nearby_size(graph: fx.Graph, size: fx.Node, reader: fx.Node) -> fx.Node:
    """The integer `size` for `reader`: an extent of a nearby tensor, a multiple of it where `size` is a rounded
    quotient, which exporters do not take, or computed from such; else `size` itself."""
    from swin_quant.models.symbolic_int import remove_roundings  # it imports sympy

    inputs = [one for one in size.all_input_nodes if isinstance(one.meta.get("val"), torch.SymInt)]
    near = {one: _nearby_size(graph, one, reader) for one in inputs}
    if inputs and len(inputs) == len(size.all_input_nodes) and not any(one is own for one, own in near.items()):
        args = fx.map_arg(size.args, lambda one: near.get(one, one))
        return _inserted(graph, reader, size.meta["val"], size.target, *args)
    exact = remove_roundings(size.meta["val"])
    for tensor in _nearest(reader):
        for dim, extent in enumerate(tensor.meta["val"].shape):
            factor = exact / extent.node.expr if isinstance(extent, torch.SymInt) else None
            if factor == 1:
                return _inserted(graph, reader, size.meta["val"], torch.ops.aten.sym_size.int, tensor, dim)
            if factor is not None and factor.is_Integer and exact is not size.meta["val"].node.expr:
                extents = _inserted(graph, reader, extent, torch.ops.aten.sym_size.int, tensor, dim)
                return _inserted(graph, reader, size.meta["val"], operator.mul, extents, int(factor))
    return size


def _nearest(reader: fx.Node) -> Iterator[fx.Node]:
    """The tensors before `reader` that depend on pictures: its inputs, their inputs, and so on; if it has none,
    starting from its own readers."""
    start = reader
    while not start.meta["depends"]:
        start = next(iter(start.users), start)
        if not start.users:
            return
    front, seen = [start], {start}
    while front:  # breadth first
        node = front.pop(0)
        if node < reader and isinstance(node.meta.get("val"), Tensor):
            yield node
        more = [one for one in node.all_input_nodes if one.meta["depends"] and one not in seen]
        seen.update(more)
        front += more


def _inserted(graph: fx.Graph, reader: fx.Node, value: Any, function: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(reader):
        made = graph.call_function(function, args)
    made.meta = {"val": value, "depends": False, "nn_module_stack": reader.meta.get("nn_module_stack")}
    return made
