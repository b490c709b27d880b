"""Units of a captured network: the modules that its forward pass runs one after another, each on one tensor.

A module is closed if one tensor goes in and one comes out. Units are the closed modules that hold a whole residual
branch (blocks), and the modules without one between them. The graph calls each unit as a module again, so that passes
can run, observe and change it alone (`quant.passes.units`). Names stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from swin_quant.models.capture import CONSTANT, stack
from swin_quant.models.placement import ADDS, CONVOLUTIONS, LAYERS, NORMS, name_operation

WHOLE = ("",)
MERGES = ADDS | {"cat", "concat"}
_CHANNELS_FIRST = CONVOLUTIONS | NORMS | {"layernorm2d"}
_CHANNELS_LAST = frozenset({"linear", "quantlinear", "layernorm"})


@dataclass(frozen=True)
class Region:
    """A module, its operations in order, and the index of the first one in the graph."""

    name: str
    start: int
    nodes: tuple[fx.Node, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.nodes)


def chain(graph: fx.Graph, root: nn.Module) -> list[Region]:
    """The run of consecutive regions with the most layers; its first and last region have layers.

    Empty if the run has less than half of the graph's layers.
    """
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    layers = [node.op == "call_module" and name_operation(node, root) in LAYERS for node in nodes]
    starts: dict[int, list[Region]] = {}
    for region in _eligible(graph, nodes, layers, root):
        starts.setdefault(region.start, []).append(region)
    rows: list[list[Region]] = [[]]
    place = 0
    while place < len(nodes):
        if place in starts:
            rows[-1].append(max(starts[place], key=lambda region: (region.stop, -len(region.name))))
            place = rows[-1][-1].stop
        else:
            rows.append([])
            place += 1

    def held(region: Region) -> int:
        return sum(layers[region.start : region.stop])

    best = max(rows, key=lambda row: sum(map(held, row)))
    if 2 * sum(map(held, best)) < sum(layers):
        return []
    with_layers = [number for number, region in enumerate(best) if held(region)]
    return best[with_layers[0] : with_layers[-1] + 1]


def _eligible(graph: fx.Graph, nodes: list[fx.Node], layers: list[bool], root: nn.Module) -> Iterator[Region]:
    """The outermost closed modules with a residual branch of their own; and the modules without one."""
    flowing = _flowing(graph, nodes)
    regions = {region.name: region for region in _closed(nodes, flowing)}
    owners: set[str] = set()
    for place, node in enumerate(nodes):
        if name_operation(node, root) in MERGES:
            start = max((cut for cut in flowing if cut <= place), default=len(nodes))
            stop = min(cut for cut in flowing if cut > place)
            around = [one for one in regions.values() if one.start <= start and stop <= one.stop]
            if around and sum(layers[start:stop]):
                owners.add(min(around, key=lambda one: (one.stop - one.start, -len(one.name))).name)
    blocks = {name for name in owners if not any(name.startswith(f"{other}.") for other in owners)}
    for name, region in regions.items():
        if name in blocks or not any(block.startswith(f"{name}.") for block in blocks):
            yield region


def _flowing(graph: fx.Graph, nodes: list[fx.Node]) -> dict[int, fx.Node]:
    """The one tensor that flows at a place between operations, by place.

    Further outputs of the network do not count, nor values that depend on no picture.
    """
    index = {node: number for number, node in enumerate(nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    alive: dict[int, list[fx.Node]] = {place: [] for place in range(len(nodes) + 1)}
    for node in (*inputs, *(node for node in nodes if node.meta["depends"])):
        last = max((index[user] for user in node.users if user in index), default=-1)
        for place in range(index.get(node, -1) + 1, last + 1):
            alive[place].append(node)
    result = output.args[0]
    alive[len(nodes)].append(result if isinstance(result, fx.Node) else nodes[-1])
    return {place: values[0] for place, values in alive.items() if len(values) == 1}


def _closed(nodes: list[fx.Node], flowing: Mapping[int, fx.Node]) -> Iterator[Region]:
    """Every module with all its operations between two places where one tensor flows."""
    inside: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        # The called module, or the one whose forward pass contains the operation
        home = str(node.target) if node.op in ("call_module", "get_attr") else stack(node)[1]
        words = home.split(".") if home else []
        for depth in range(1, len(words) + 1):
            inside.setdefault(".".join(words[:depth]), []).append(number)
    for name, places in inside.items():
        start, stop = places[0], places[-1] + 1
        if len(places) != stop - start or start not in flowing or flowing.get(stop) is not nodes[stop - 1]:
            continue
        region = nodes[start:stop]
        within = {flowing[start], *region}
        reads = {one for node in region for one in node.all_input_nodes} - within
        leaks = any(user not in within for node in region[:-1] for user in node.users)
        itself = len(region) > 1 and any(str(node.target) == name for node in region)  # a norm that holds an activation
        # Values of the module itself, and constants from capturing
        own = all(one.op == "get_attr" and str(one.target).startswith((f"{name}.", CONSTANT)) for one in reads)
        if own and not leaks and not itself:
            yield Region(name, start, tuple(region))


def taken_out(graph: fx.Graph, region: Region) -> fx.Graph:
    """The graph of a region, relative to its own module; `graph` then calls that module instead."""
    reads = dict.fromkeys(one for node in region.nodes for one in node.all_input_nodes if one not in region.nodes)
    (source,) = (one for one in reads if one.op != "get_attr")
    inner, prefix = fx.Graph(), f"{region.name}."
    copies = {source: inner.placeholder("x")}
    for node in (*(one for one in reads if one is not source), *region.nodes):
        copies[node] = copy = inner.node_copy(node, copies.__getitem__)
        if node.op in ("call_module", "get_attr"):
            copy.target = str(node.target).removeprefix(prefix)
    gives = region.nodes[-1]
    inner.output(copies[gives])
    with graph.inserting_after(gives):
        call = graph.call_module(region.name, (source,))
    gives.replace_all_uses_with(call)
    for node in reversed(region.nodes):
        graph.erase_node(node)
    for node in reads:
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return inner


def channel_dim(node: fx.Node, root: nn.Module) -> int:
    """The dimension of channels in the output of `node`, 1 or -1, taken from the layers before it."""
    seen: set[fx.Node] = set()
    front = [node]
    while front:
        node = front.pop(0)
        word = name_operation(node, root)
        if word in _CHANNELS_FIRST:
            return 1
        if word in _CHANNELS_LAST:
            return -1
        if word == "permute":
            order = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
            if tuple(order) in ((0, 3, 1, 2), (0, 2, 3, 1)):
                return 1 if tuple(order) == (0, 3, 1, 2) else -1
        seen.add(node)
        front += [one for one in node.all_input_nodes if one.op != "get_attr" and one not in seen]
    return -1
