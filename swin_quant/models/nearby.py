"""Let each operation of a captured graph take sizes and devices from a nearby tensor.

torch.export reads the batch's size once, from the pictures. A unit that needs it could then not run alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx


def take_from_nearby(graph: fx.Graph) -> None:
    """Read sizes from the nearest tensor that has them, and make new tensors on the device of the nearest one."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        for size in node.all_input_nodes:
            if isinstance(size.meta.get("val"), torch.SymInt):
                node.replace_input_with(size, _size(graph, size, node))
        if node.kwargs.get("device") is not None and (near := next(_nearest(node), None)) is not None:
            node.kwargs = {**node.kwargs, "device": _inserted(graph, node, None, getattr, near, "device")}
    graph.eliminate_dead_code()


def _size(graph: fx.Graph, size: fx.Node, reader: fx.Node) -> fx.Node:
    """The integer `size` for `reader`: an extent of a nearby tensor, or computed from such; else `size` itself."""
    inputs = [one for one in size.all_input_nodes if isinstance(one.meta.get("val"), torch.SymInt)]
    near = {one: _size(graph, one, reader) for one in inputs}
    if inputs and len(inputs) == len(size.all_input_nodes) and not any(one is own for one, own in near.items()):
        args = fx.map_arg(size.args, lambda one: near.get(one, one))
        return _inserted(graph, reader, size.meta["val"], size.target, *args)
    wanted = str(size.meta["val"])
    for tensor in _nearest(reader):
        for dim, extent in enumerate(tensor.meta["val"].shape):
            if isinstance(extent, torch.SymInt) and str(extent) == wanted:
                return _inserted(graph, reader, size.meta["val"], torch.ops.aten.sym_size.int, tensor, dim)
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
