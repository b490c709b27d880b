"""Any network, traced by torch.fx: its layers become ours, and nodes are inserted where `placement` says.

Names of modules and parameters stay, so that its checkpoints fit. The forward pass of evaluation is traced; modules of
torch's own stay modules, which train as before.
"""

import inspect
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from swin_quant.base.errors import SwinQuantError, first_line
from swin_quant.models.classifier import Classifier
from swin_quant.models.cuts import CONSTANT, WHOLE, chain, channel_dim, taken_out
from swin_quant.models.exchanges import exchanges
from swin_quant.models.placement import Place, foldable, input_role, output_role, places, source_of, word_of
from swin_quant.quant.conv import QuantConv2d
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.linear import QuantLinear
from swin_quant.quant.quantizer import Quantizer

Operations = tuple[Callable[..., Any], ...]
_Layers = (nn.Linear, nn.Conv2d)
_WHOLE = (*_Layers, nn.LayerNorm, nn.BatchNorm2d)  # and their subclasses


class Traced(Classifier):
    """The modules of another network, and its forward pass with nodes. Pictures [B, in, S, S] -> logits [B, classes].

    `foldable`: name of a batch norm -> name of the layer that it can be folded into (`quant.fold`).
    """

    _run: Callable[..., Tensor]

    def __init__(
        self, root: nn.Module, graph: fx.Graph, image_size: int, in_chans: int, classes: int, foldable: dict[str, str]
    ) -> None:
        super().__init__(image_size, in_chans, classes)
        self.foldable = foldable
        self._used = frozenset(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
        self.own_exchanges = tuple(exchanges(graph, root, foldable))
        self.own_units = _taken_apart(graph, root)
        _take_over(self, root)
        _give_constants(self, graph, root)
        self._run = _compiled(graph, root)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        return self._run(self, images)

    def prune(self) -> list[str]:
        """Drop the modules that the forward pass does not reach; returns the names of the outermost ones.

        Modules without parameters are named, too: their nodes have ranges in checkpoints of the whole network.
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


class TracedPart(nn.Module):
    """A module of a traced network with its part of the forward pass: x -> output.

    `channel_dim`: the dimension of channels in the output.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        (output,) = (node for node in graph.nodes if node.op == "output")
        self.channel_dim = channel_dim(output.args[0], root)
        _take_over(self, root)
        self._run = _compiled(graph, root)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._run(self, x)
        return result


def _taken_apart(graph: fx.Graph, root: nn.Module) -> tuple[str, ...]:
    """The names of a graph's units, in order, which it now calls; the whole network is one unit if it has none."""
    found = chain(graph, root)
    for region in found:
        own = root.get_submodule(region.name)
        if len(region.nodes) > 1 or str(region.nodes[0].target) != region.name:
            parent, _, name = region.name.rpartition(".")
            inner = taken_out(graph, region)
            part = TracedPart(own, inner)
            _give_constants(part, inner, root)
            setattr(root.get_submodule(parent), name, part)
    return tuple(region.name for region in found) or WHOLE


def _take_over(module: nn.Module, root: nn.Module) -> None:
    """Give `module` the children, parameters and buffers of `root`."""
    for name, child in root.named_children():
        module.add_module(name, child)
    for name, parameter in root.named_parameters(recurse=False):
        module.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        module.register_buffer(name, buffer, persistent=name not in root._non_persistent_buffers_set)


def _give_constants(module: nn.Module, graph: fx.Graph, root: nn.Module) -> None:
    """Give `module` the constants that tracing found and its graph reads."""
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT) and not hasattr(module, str(node.target)):
            module.register_buffer(str(node.target), getattr(root, str(node.target)), persistent=False)


def _compiled(graph: fx.Graph, root: nn.Module) -> Callable[..., Tensor]:
    """A graph as a forward function."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"<forward of {type(root).__name__}>", "exec"), scope)  # fx's own text of its graph
    forward: Callable[..., Tensor] = scope["forward"]
    return forward


def traced(
    module: nn.Module,
    image_size: int,
    in_chans: int,
    classes: int,
    *,
    what: str,
    leaves: Collection[type] = (),
    whole: Operations = (),
    split: Callable[[nn.Module, fx.Graph], None] = lambda root, graph: None,
    stem: bool = True,
) -> Traced:
    """`module` as a network with nodes; `module` itself is used up. SwinQuantError names `what` and the obstacle.

    `leaves`: classes of modules, and `whole` functions, that are not looked into; `split` may take apart what a leaf
    holds. `stem`: whether the layers that read the pictures themselves are quantized.
    """
    module.eval()
    graph = _Tracer(tuple(leaves), whole).traced(module, what)
    split(module, graph)
    _tidy(graph, module)
    for node in list(graph.nodes):
        if word_of(node, module) == "scaleddotproductattention":
            _spell_out(graph, node, what)
    layers = _layers(graph, module, stem)
    if not layers:
        raise SwinQuantError(f"{what}: has no linear and no convolution that could be quantized")
    norms = foldable(graph, module)
    for node in graph.nodes:
        if str(node.target) in layers and isinstance(layers[str(node.target)], QuantConv2d):
            layers[str(node.target)]._aftergemm_quantizer.role = output_role(node, module, norms)
    for place in list(places(graph, module)):
        _add(graph, module, place)
    graph.lint()
    return Traced(module, graph, image_size, in_chans, classes, norms)


class _Tracer(fx.Tracer):
    def __init__(self, leaves: tuple[type, ...], whole: Operations) -> None:
        super().__init__(autowrap_functions=whole)
        self.leaves, self.at = leaves, ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*self.leaves, *_WHOLE)) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.at = self.path_of_module(m)
        return super().call_module(m, forward, args, kwargs)

    def traced(self, module: nn.Module, what: str) -> fx.Graph:
        try:
            graph = self.trace(module, concrete_args=_defaults(module))
        except Exception as error:  # a forward pass may raise anything on fx's proxies
            reason = first_line(error)
            where = f"in or behind {self.at} ({type(module.get_submodule(self.at)).__name__})" if self.at else "at once"
            raise SwinQuantError(f"{what}: cannot be traced, {where}: {reason}") from error
        for node in [node for node in graph.nodes if word_of(node, module).startswith("assert")]:
            graph.erase_node(node)  # checks of sizes, and of optional arguments
        graph.owning_module = module  # type: ignore[assignment]  # it asks for modules alone
        graph.eliminate_dead_code()
        others = [node for node in graph.nodes if node.op == "placeholder"][1:]
        for node in others:
            if not node.users:
                graph.erase_node(node)
        if any(node.users for node in others):
            raise SwinQuantError(f"{what}: takes more than one input: wrap it in a module that takes pictures alone")
        return graph


def _defaults(module: nn.Module) -> dict[str, Any]:
    """The arguments of a forward pass beside pictures, at their defaults."""
    _, *others = inspect.signature(module.forward).parameters.values()
    return {one.name: one.default for one in others if one.default is not one.empty}


def _tidy(graph: fx.Graph, root: nn.Module) -> None:
    """Remove operations without effect, and make the rest out of place, since nodes read their inputs."""
    for node in list(graph.nodes):
        if node.op == "call_module" and type(root.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for module in root.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]  # a flag of torch's activations


def _layers(graph: fx.Graph, root: nn.Module, stem: bool) -> dict[str, QuantizedLayer]:
    """Replace linears and convolutions by ours, which take over their parameters."""
    found: dict[str, QuantizedLayer] = {}
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(node.args[0] if node.args else None, fx.Node):
            continue
        name = str(node.target)
        layer = root.get_submodule(name)
        if name in found or not _is_plain(layer):
            continue
        if not stem and source_of(node.args[0], root).op == "placeholder":
            continue
        found[name] = ours = _ours(layer)
        ours._input_quantizer.role = input_role(node.args[0], root)
        parent, _, own = name.rpartition(".")
        setattr(root.get_submodule(parent), own, ours)
    return found


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes the same as torch's: torch's own class, or a subclass that only casts."""
    kind = type(layer)
    return kind in _Layers or (kind.__name__ == "Linear" and isinstance(layer, nn.Linear))


def _ours(layer: nn.Module) -> QuantizedLayer:
    biased = layer.bias is not None
    ours: QuantConv2d | QuantLinear
    with torch.device("meta"):
        if isinstance(layer, nn.Conv2d):
            ours = QuantConv2d(
                layer.in_channels,
                layer.out_channels,
                layer.kernel_size,
                layer.stride,
                layer.padding,
                layer.dilation,
                layer.groups,
                biased,
                layer.padding_mode,
            )
        elif isinstance(layer, nn.Linear):
            ours = QuantLinear(layer.in_features, layer.out_features, biased)
        else:
            raise TypeError(f"{type(layer).__name__} is no layer")
    ours.weight, ours.bias = layer.weight, layer.bias
    return ours.train(layer.training)


def _spell_out(graph: fx.Graph, node: fx.Node, what: str) -> None:
    """Replace fused attention by its two products and softmax."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("is_causal") or given.get("enable_gqa"):
        remedy = "write it as two products and a softmax"
        raise SwinQuantError(f"{what}: {node.name} is causal or grouped attention, which is not supported: {remedy}")

    def call(function: Any, *inputs: Any) -> fx.Node:
        made = (
            graph.call_method(function, inputs) if isinstance(function, str) else graph.call_function(function, inputs)
        )
        made.meta.update(node.meta)
        return made

    with graph.inserting_before(node):
        query, key, scale = given["query"], given["key"], given.get("scale")
        scale = call(operator.pow, call("size", query, -1), -0.5) if scale is None else scale
        scores = call(torch.matmul, call(operator.mul, query, scale), call("transpose", key, -2, -1))
        if given.get("attn_mask") is not None:
            scores = call(masked, scores, given["attn_mask"])
        result = call(torch.matmul, call(F.softmax, scores, -1), given["value"])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Apply a mask as torch's fused attention does: a boolean one selects, any other is added."""
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask


def _add(graph: fx.Graph, root: nn.Module, place: Place) -> None:
    owner, _, own = place.name.rpartition(".")
    root.get_submodule(owner).add_module(own, Quantizer(place.role))
    with graph.inserting_before(place.at):
        node = graph.call_module(place.name, (place.at.args[place.argument],))
    place.at.update_arg(place.argument, node)
