"""A network captured by torch.export: its layers become ours, and nodes are inserted where `placement` says.

Names of modules and parameters stay, so its checkpoints fit. The forward pass in evaluation mode is captured; torch's
own modules stay modules, which train as before (`capture`). The graph shows where factors and offsets can move
(`quant.passes.places`): at a layer whose channels only other layers read, through functions that give k y for k x
(cross-layer equalization: Nagel et al., 2019), and at a norm that only layers read.
"""

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.inputs import Inputs
from swin_quant.models.capture import CONSTANT, capture, is_whole, packet
from swin_quant.models.captured_layers import batch_dim, call_instead, mark_shared, quantized_layers
from swin_quant.models.classifier import Classifier
from swin_quant.models.cuts import WHOLE, chain, channel_dim, taken_out
from swin_quant.models.placement import SIZES, foldable, name_operation, output_role, places, products
from swin_quant.models.plain_operations import spell_out, take_from_nearby
from swin_quant.quant.layer import QuantConv, QuantizedLayer, Reading
from swin_quant.quant.passes.places import Exchange, Part, make_norm_exchange
from swin_quant.quant.quantizer import Quantizer

_EXAMPLES = 2  # pictures to capture with: a batch of one may be taken for a constant
_BATCH_NORMS = {"batch_norm": 7, "_native_batch_norm_legit_no_training": 6}  # the place of eps
_REPEATS = ("expand", "unsqueeze", "view", "reshape")  # give the values of a mask again
_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
# Modules and functions that give k y for k x, channel by channel, for every k above zero.
HOMOGENEOUS = frozenset(
    "identity dropout dropout2d droppath contiguous clone relu leakyrelu maxpool2d maxpool2dsame avgpool2d "
    "avgpool2dsame adaptiveavgpool2d adaptivemaxpool2d flatten folded".split()
)
STILL = frozenset("identity dropout droppath contiguous clone".split())  # give their input unchanged in evaluation


class CapturedNetwork(Classifier):
    """The modules of another network, and its forward pass with nodes: [B, *input_shape] -> logits [B, classes].

    `foldable`: the layer that each batch norm can be folded into (`quant.fold`). `products`: for its `coverage`.
    """

    _run: Callable[..., Tensor]

    def __init__(
        self, root: nn.Module, graph: fx.Graph, input_shape: Sequence[int], classes: int, foldable: dict[str, str]
    ) -> None:
        super().__init__(input_shape, classes)
        self.foldable = foldable
        self.products = tuple(products(graph, root, _EXAMPLES))
        self.parameters_read = frozenset(str(node.target) for node in graph.nodes if node.op == "get_attr")
        self._used = {str(node.target) for node in graph.nodes if node.op == "call_module"} | self.parameters_read
        self._used |= {key for part in root.modules() if isinstance(part, QuantizedLayer) for key in part.lenders}
        mark_shared(graph, root)
        self.own_exchanges = tuple(exchanges(graph, root, foldable))
        regions = chain(graph, root)
        for region in regions:  # the graph now calls its units; the whole network is one unit if it has none
            own = root.get_submodule(region.name)
            if len(region.nodes) > 1 or str(region.nodes[0].target) != region.name:
                inner = taken_out(graph, region)
                part = CapturedPart(own, inner)
                _give_constants(part, inner, root)
                root.set_submodule(region.name, part)
        self.own_units = tuple(region.name for region in regions) or WHOLE
        _take_over(self, root)
        _give_constants(self, graph, root)
        self._run = _compiled(graph, root)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        return self._run(self, **self.inputs.unpack(images)) if self.inputs else self._run(self, images)

    @property
    def by_name(self) -> Callable[..., Tensor]:
        """The forward pass, a function of a network and its inputs by name."""
        return self._run

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse a pickle: its forward pass is a function that lies in no file."""
        raise UsageError("a wrapped model is not pickled: model.save(FILE) writes it, sq.load(FILE, module) reads it")

    def __deepcopy__(self, memo: dict[int, Any]) -> "CapturedNetwork":
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def prune(self) -> list[str]:
        """Drop the modules that the forward pass does not reach; returns the names of the outermost ones.

        Modules without parameters are named too: their nodes have ranges in checkpoints of the whole network.
        """
        dropped: list[str] = []
        for name in [name for name, _ in self.named_modules() if name]:
            if any(f"{name}.".startswith(f"{gone}.") for gone in dropped):
                continue
            if not any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in self._used):
                parent, _, own = name.rpartition(".")
                delattr(self.get_submodule(parent), own)
                dropped.append(name)
        return dropped


class CapturedPart(nn.Module):
    """A module of a captured network with its part of the forward pass: x -> output.

    `channel_dim`: the dimension of channels in the output.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        (output,) = (node for node in graph.nodes if node.op == "output")
        self.channel_dim = channel_dim(output.args[0], root)
        _take_over(self, root)
        self._run = _compiled(graph, root)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def _take_over(module: nn.Module, root: nn.Module) -> None:
    """Give `module` the children, parameters and buffers of `root`. SwinQuantError for a name that `module` needs."""
    children = [(name, child) for name, child in root._modules.items() if child is not None]  # also by a second name
    parts = (children, root.named_parameters(recurse=False), root.named_buffers(recurse=False))
    if taken := [name for one in parts for name, _ in one if hasattr(module, name)]:
        raise SwinQuantError(f"{taken[0]}: no part of a network may have this name: put it into a module that calls it")
    for name, child in children:
        module.add_module(name, child)
    for name, parameter in root.named_parameters(recurse=False):
        module.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        module.register_buffer(name, buffer, persistent=name not in root._non_persistent_buffers_set)


def _give_constants(module: nn.Module, graph: fx.Graph, root: nn.Module) -> None:
    """Give `module` the constants from capturing that its graph reads."""
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT) and not hasattr(module, str(node.target)):
            module.register_buffer(str(node.target), getattr(root, str(node.target)), persistent=False)


def _compiled(graph: fx.Graph, root: nn.Module) -> Callable[..., Tensor]:
    """A graph as a forward function. Parameters of our layers are read through `Reading`."""
    for node in graph.nodes:
        owner, _, own = str(node.target).rpartition(".")
        if node.op == "get_attr" and isinstance(layer := root.get_submodule(owner), QuantizedLayer):
            layer.read_by_others = getattr(layer, "read_by_others", None) or Reading(layer)
            node.target = f"{owner}.read_by_others.{own}"
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"<forward of {type(root).__name__}>", "exec"), scope)  # fx's own text of its graph
    scope["forward"].graph, graph.owning_module = graph, None
    return scope["forward"]


def graphs(network: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """A captured network and its parts, each with a copy of its graph, which calls its modules by name."""
    for part in network.modules():
        if isinstance(part, CapturedNetwork | CapturedPart):
            graph = copy.deepcopy(cast(Any, part._run).graph)
            graph.owning_module = part
            yield part, graph


def run_graph(part: nn.Module, graph: fx.Graph) -> None:
    """Let a network or a part of it run another graph of its modules from now on."""
    graph.eliminate_dead_code()
    graph.lint()
    part._run = _compiled(graph, part)  # type: ignore[assignment]  # no submodule


def captured(
    module: nn.Module,
    input_shape: Sequence[int],
    classes: int,
    *,
    what: str,
    stem: bool = True,
    any_size: bool = False,
    outputs: Sequence[int] | None = None,
    inputs: Inputs | None = None,
) -> CapturedNetwork:
    """`module` as a network with nodes; `module` itself is used up. SwinQuantError names `what` and the obstacle.

    `input_shape`: one input's, without the batch. `stem`: whether the layers that read the pictures are quantized.
    `any_size`: the network takes pictures of other sizes too. `outputs`: the positions of the returned tensors in the
    tree of the output; None: all. A single one is returned alone, several in a list. `inputs`: those that it takes by
    name; `input_shape` is then that of the packed ones.
    """
    module.eval()
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    pictures = torch.zeros(_EXAMPLES, *input_shape, device=device)
    given = inputs.unpack(pictures) if inputs else pictures
    graph = capture(module, given, what, any_size=any_size, outputs=outputs)
    spell_out(graph)
    for node in list(graph.nodes):
        if name_operation(node, module) == "scaleddotproductattention":
            _spell_out(graph, node, module, what)
        sizes = [one.meta.get("val") if isinstance(one, fx.Node) else one for one in node.args[6:]]
        if packet(node).startswith("conv") and any(isinstance(size, torch.SymInt) for size in sizes):
            remedy = "multiply patches (torch.nn.functional.unfold) by the kernels with torch.matmul"
            raise SwinQuantError(f"{what}: {node.name} has kernels for each picture, which no engine takes: {remedy}")
    take_from_nearby(graph)
    _call_norms(graph, module)
    layers = quantized_layers(graph, module, stem)
    if not layers:
        remedy = "if it keeps results of an earlier call, clear them"
        raise SwinQuantError(f"{what}: no linear and no convolution depends on its input: {remedy}")
    norms = foldable(graph, module)
    for node in graph.nodes:
        if str(node.target) in layers and isinstance(layers[str(node.target)], QuantConv):
            layers[str(node.target)]._aftergemm_quantizer.role = output_role(node, module, norms)
    for place in list(places(graph, module)):
        owner, _, own = place.name.rpartition(".")
        source = cast(fx.Node, place.at.args[place.argument])
        quantizer = Quantizer(place.role)
        quantizer.batch_dim = batch_dim(source)
        module.get_submodule(owner).add_module(own, quantizer)
        with graph.inserting_before(place.at):
            call = graph.call_module(place.name, (source,))
        call.meta = dict(source.meta)
        place.at.update_arg(place.argument, call)
    graph.lint()
    network = CapturedNetwork(module, graph, input_shape, classes, norms)
    network.inputs = inputs
    return network


def _value(argument: Any, root: nn.Module) -> Any:
    """The parameter or buffer that an argument reads, shared or not; any other argument itself."""
    is_read = isinstance(argument, fx.Node) and argument.op == "get_attr"
    return operator.attrgetter(str(argument.target))(root) if is_read else argument


def _call_norms(graph: fx.Graph, root: nn.Module) -> None:
    """Call batch norms that do more, by children (dropout, activation) or hooks, as plain ones with the same name,
    followed by what they do besides."""
    for node in list(graph.nodes):
        mean = node.args[3] if packet(node) in _BATCH_NORMS else None
        if not isinstance(mean, fx.Node) or mean.op != "get_attr":
            continue
        name = str(mean.target).rpartition(".")[0]
        norm = root.get_submodule(name)
        if not isinstance(norm, nn.BatchNorm2d) or node.args[_BATCH_NORMS[packet(node)]] != norm.eps:
            continue
        given = [_value(one, root) for one in node.args[1:5]]
        if any(one is not getattr(norm, key) for one, key in zip(given, _NORM_PARTS, strict=True)):  # of another norm
            continue
        if type(norm) is not nn.BatchNorm2d or not is_whole(norm):
            plain = nn.BatchNorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
            plain.train(norm.training)
            for key, value in {**norm._parameters, **norm._buffers}.items():
                setattr(plain, key, value)
            for below, child in norm.named_children():
                plain.add_module(below, child)
            root.set_submodule(name, plain)
        call_instead(graph, node, name)
    graph.eliminate_dead_code()


def _spell_out(graph: fx.Graph, node: fx.Node, root: nn.Module, what: str) -> None:
    """Replace fused attention by its two products and softmax."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    query, key, value, mask = arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_mask")
    sizes = [one.meta["val"].shape[-2] for one in (query, key)]
    if arguments.get("is_causal") and not all(isinstance(size, int) for size in sizes):
        remedy = "write it as two products and a softmax"
        raise SwinQuantError(f"{what}: {node.name} is causal attention of any length, which is not supported: {remedy}")

    def call(function: Any, *inputs: Any) -> fx.Node:
        made = graph.call_function(function, inputs)
        made.meta = {key: value for key, value in node.meta.items() if key != "val"}
        return made

    aten = torch.ops.aten
    with graph.inserting_before(node):
        if arguments.get("enable_gqa"):
            groups = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
            key, value = (call(aten.repeat_interleave.self_int, one, groups, -3) for one in (key, value))
        if arguments.get("is_causal"):
            table = torch.full(sizes, -torch.inf).triu(1)
            root.register_buffer(f"{CONSTANT}_{node.name}", table, persistent=False)
            mask = graph.get_attr(f"{CONSTANT}_{node.name}")
            mask.meta.update({"depends": False, "val": table})
        scale = query.meta["val"].shape[-1] ** -0.5 if arguments.get("scale") is None else arguments["scale"]
        scores = call(aten.matmul.default, call(aten.mul.Tensor, query, scale), call(aten.transpose.int, key, -2, -1))
        if mask is not None:
            kept = mask
            while packet(kept) in _REPEATS:
                kept = kept.args[0]
            held = _value(kept, root) if str(kept.target).startswith(CONSTANT) else None
            if isinstance(held, Tensor) and held.dtype is torch.bool and held.all():
                mask = None  # a constant that keeps every score: transformers gives one where nothing is masked
        if mask is not None and mask.meta["val"].dtype is torch.bool:  # it selects
            scores = call(aten.masked_fill.Scalar, scores, call(aten.logical_not.default, mask), -torch.inf)
        elif mask is not None:
            scores = call(aten.add.Tensor, scores, mask)
        result = call(aten.matmul.default, call(aten.softmax.int, scores, -1), value)
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def exchanges(graph: fx.Graph, root: nn.Module, norms: Mapping[str, str]) -> Iterator[Exchange]:
    """The exchanges of a graph whose layers are ours. `norms`: batch norms that are folded into layers (`foldable`).

    Parameters that another layer shares, or the forward pass reads itself, stay as they are.
    """
    owners = Counter(id(one) for part in root.modules() for one in part._parameters.values())
    fixed = {key for key, one in root.named_parameters(remove_duplicate=False) if owners[id(one)] > 1}
    fixed |= {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or calls.count(name) > 1:
            continue
        module = root.get_submodule(name)
        if isinstance(module, QuantizedLayer):
            readers = _readers(node, root, HOMOGENEOUS, norms, len(module.weight))
            found = Exchange(Part(name), tuple(Part(f"{name}.{kind}") for kind in ("weight", "bias")))
        elif isinstance(module, nn.LayerNorm):
            readers = _readers(node, root, STILL, {}, module.normalized_shape[0])
            found = make_norm_exchange(name, tuple(readers))
            if not all(isinstance(root.get_submodule(reader), nn.Linear) for reader in readers):
                found = replace(found, offset=None, into=())  # padding is zero, whatever the offset
        else:
            continue
        depthwise = [getattr(root.get_submodule(reader), "groups", 1) > 1 for reader in readers]  # rows are channels
        after = tuple(Part(f"{one}.weight", dim=0 if rows else 1) for one, rows in zip(readers, depthwise, strict=True))
        if readers and fixed.isdisjoint(part.name for part in found.before + after):
            yield replace(found, scaled=Part(f"{readers[0]}._input_quantizer"), after=after)


def _readers(
    node: fx.Node, root: nn.Module, through: frozenset[str], norms: Mapping[str, str], channels: int
) -> list[str]:
    """The layers that alone read the output of `node`, channel by channel; none if anything else reads it."""
    found: list[str] = []
    for user in node.users:
        if name_operation(user, root) in SIZES:
            continue
        layer = root.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(layer, QuantizedLayer):
            taken = layer.weight.shape[1]  # the channels with weights of their own; none where groups mix them
            if (groups := getattr(layer, "groups", 1)) > 1:
                taken = len(layer.weight) if groups == len(layer.weight) and taken == 1 else 0
            more = [str(user.target)] if taken == channels else []
        elif str(user.target) in norms or name_operation(user, root) in through:
            more = _readers(user, root, through, norms, channels)
        else:
            more = []
        if not more:
            return []
        found += more
    return found
