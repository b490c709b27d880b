"""Replace the linears and convolutions of a captured graph by ours, which take over their parameters."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.models.capture import CONSTANT, packet, stack
from swin_quant.models.placement import find_range_source, has_batch, input_role, is_real
from swin_quant.quant.layer import (
    Lender,
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose2d,
    QuantizedLayer,
    QuantLinear,
)

_OURS: dict[str, type] = {"linear": QuantLinear, "conv1d": QuantConv1d, "conv2d": QuantConv2d, "conv3d": QuantConv3d}
_BORROWING = ("linear", "conv2d")  # kinds that may have the weight of another layer
_PLAIN = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}
_TRANSPOSED = "conv_transpose2d"
_CONVOLUTION = (1, 0, 1, 1)  # default stride, padding, dilation and groups of an operation


def quantized_layers(graph: fx.Graph, root: nn.Module, stem: bool) -> dict[str, QuantizedLayer]:
    """Every layer that multiplies values that depend on the pictures, by name; `graph` then calls it.

    A weight outside of a module of its own, or a computed one, is borrowed (`quant.layer`). A layer that is called
    again becomes another one with copies, because its inputs may be far larger: 1 to 800 in CoaT. `stem`: whether to
    include the layers that read the pictures.
    """
    found: dict[str, QuantizedLayer] = {}
    layer: Any
    how: tuple[Any, ...]
    for node in list(graph.nodes):
        kind = _kind(node, root, found)
        source = node.args[0] if node.args else None
        if not kind or not isinstance(source, fx.Node) or not source.meta["depends"]:
            continue
        if not has_batch(source) or not is_real(source):
            continue
        if not stem and find_range_source(source, root).op == "placeholder":
            continue
        name = f"{node.target}.{_TRANSPOSED}" if kind == _TRANSPOSED else _own_name(node, root)
        if kind == _TRANSPOSED and name not in found:  # with copies, since a norm may be folded into it
            layer = root.get_submodule(str(node.target))
            how = layer.stride, layer.padding, layer.output_padding, 1, layer.bias is not None, layer.dilation
            with torch.device("meta"):
                transposed = QuantConvTranspose2d(layer.in_channels, layer.out_channels, layer.kernel_size, *how)
            found[name] = _with_copies(transposed, str(node.target), layer, lambda weight: weight.transpose(0, 1))
        elif name and name not in found:
            found[name] = _owner(node, root.get_submodule(name), kind)
        elif name and kind in _BORROWING:
            layer, (parent, _, own) = found[name], name.rpartition(".")
            how = () if kind == "linear" else (layer.stride, layer.padding, layer.dilation, layer.groups)
            mode = getattr(layer, "padding_mode", "zeros")
            again = _made(_OURS[kind], layer.weight, layer.bias is not None, how, mode)
            again, name = _with_copies(again, name, layer), _free_name(root, parent, f"{own}_", 2)
            found[name] = again
        elif not name and (borrowed := _borrowing(node, root, kind)):
            name, found[borrowed[0]] = borrowed
        if not name:
            continue
        ours = found[name]
        ours._input_quantizer.role = input_role(source, root)
        ours._input_quantizer.batch_dim = batch_dim(source)
        ours._aftergemm_quantizer.batch_dim = batch_dim(node)
        root.set_submodule(name, ours)
        if name != node.target:
            call_instead(graph, node, name)
    graph.eliminate_dead_code()
    return found


def mark_shared(graph: fx.Graph, root: nn.Module) -> None:
    """Give each module the names of its parameters that `graph`, which calls our layers, reads more than once."""
    reads: Counter[int] = Counter()
    for node in graph.nodes:
        if node.op == "call_module":
            reads.update(map(id, root.get_submodule(str(node.target))._parameters.values()))
        elif node.op == "get_attr":
            reads[id(operator.attrgetter(str(node.target))(root))] += 1
    for module in root.modules():
        own = {name: one for name, one in module._parameters.items() if one is not None}
        if shared := frozenset(name for name, one in own.items() if reads[id(one)] > 1):
            module.shared_parameters = shared  # type: ignore[assignment]  # an attribute of any module


def batch_dim(node: fx.Node) -> int:
    """The first dimension of a node's output that depends on the number of pictures."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return next((dim for dim, extent in enumerate(shape) if isinstance(extent, torch.SymInt)), 0)


def call_instead(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Call the module `name` on the first input of `node`, instead of `node`."""
    with graph.inserting_before(node):
        made = graph.call_module(name, (node.args[0],))
    made.meta = dict(node.meta)
    for user in list(node.users):  # a norm returns (output, mean, variance)
        if user.target is operator.getitem:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _kind(node: fx.Node, root: nn.Module, found: Mapping[str, QuantizedLayer]) -> str:
    """The kind of a layer that a node calls or computes, also of one that is `found`; "" for any other node."""
    if node.op != "call_module":
        is_vector = packet(node) == "linear" and cast(fx.Node, node.args[1]).meta["val"].dim() < 2
        return packet(node) if packet(node) in _OURS and not is_vector else ""
    layer = root.get_submodule(str(node.target))
    if isinstance(layer, nn.Linear) and type(layer).__name__ == "Linear":  # also a subclass that only casts
        return "linear"
    if type(layer) is nn.ConvTranspose2d and layer.groups == 1:
        return _TRANSPOSED
    if isinstance(layer, QuantizedLayer):
        is_own = str(node.target) in found and not layer.sources
        return next((kind for kind in _BORROWING if is_own and type(layer) is _OURS[kind]), "")
    return _PLAIN.get(type(layer), "")


def _own_name(node: fx.Node, root: nn.Module) -> str:
    """The module with the only weight and bias of a layer; "" if there is none."""
    if node.op == "call_module":
        return str(node.target)
    weight, bias = node.args[1], (*node.args, None, None)[2]
    name, _, own = str(getattr(weight, "target", "")).rpartition(".")
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or own != "weight" or not name:
        return ""
    module = root.get_submodule(name)
    its_bias = None if getattr(module, "bias", None) is None else f"{name}.bias"
    if its_bias != getattr(bias, "target", bias) or not _multiplies_as(module, node):
        return ""
    if isinstance(module, QuantizedLayer):
        return name
    calls = [one for one in node.graph.nodes if one.op == "call_module" and one.target == name]
    if any(_kind(one, root, {}) != packet(node) for one in calls):  # another product: an embedding, a decoder
        return ""
    alone = not list(module.children()) and {*module._parameters} <= {"weight", "bias"}
    same = all(
        (one.target, one.args[1:], one.kwargs) == (node.target, node.args[1:], node.kwargs) for one in weight.users
    )
    return name if alone and same else ""


def _multiplies_as(module: Any, node: fx.Node) -> bool:
    """Whether torch's own convolution, or ours, has the stride, padding, dilation and groups of an operation."""
    if type(module) not in _PLAIN and not isinstance(module, QuantizedLayer) or isinstance(module, nn.Linear):
        return True
    own = module.stride, module.padding, module.dilation, module.groups
    dims = module.weight.dim() - 2

    def tuples(how: Sequence[Any]) -> list[Any]:
        return [tuple(one) if isinstance(one, list | tuple) else (one,) * dims for one in how]

    return module.padding_mode == "zeros" and tuples(own) == tuples(_how(node))


def _owner(node: fx.Node, layer: Any, kind: str) -> QuantizedLayer:
    """Our layer with the parameters of `layer`, which multiplies as `node` does."""
    how, mode = _how(node), "zeros"
    if node.op == "call_module" and kind != "linear":
        how, mode = (layer.stride, layer.padding, layer.dilation, layer.groups), layer.padding_mode
    bias = getattr(layer, "bias", None)
    ours = _made(_OURS[kind], layer.weight, bias is not None, how, mode)
    ours.weight, ours.bias = layer.weight, bias
    for below, child in layer.named_children():  # a layer that borrowed its weight for another call
        ours.add_module(below, child)
    return ours.train(layer.training)


def _how(node: fx.Node) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups of a convolution in ATen's arguments."""
    return (*node.args[3:7], *_CONVOLUTION[max(len(node.args) - 3, 0) :])


def _made(kind: type, weight: Tensor, biased: bool, how: tuple[Any, ...], mode: str = "zeros") -> Any:
    with torch.device("meta"):
        if weight.dim() == 2:
            return kind(weight.shape[1], weight.shape[0], biased)
        channels = weight.shape[1] * how[-1]
        return kind(channels, weight.shape[0], tuple(weight.shape[2:]), *how, biased, mode)


def _with_copies(ours: Any, name: str, layer: Any, weight: Callable[..., Tensor] = torch.clone) -> QuantizedLayer:
    """`ours` with a copy of the weight, as `weight` makes it, and of the bias of `layer`, whose name is `name`."""
    functions = {"weight": weight, "bias": torch.clone}
    own = {key: value for key, value in layer._parameters.items() if value is not None}
    lenders = {key: Lender((f"{name}.{key}",), functions[key]) for key in own}
    ours.borrow(lenders, {f"{name}.{key}": value for key, value in own.items()})
    return ours.train(layer.training)


def _free_name(root: nn.Module, parent: str, own: str, first: int) -> str:
    """The name of a new module in `parent`: `own` with the first free number from `first` on; without one from 0 on."""
    place, prefix = root.get_submodule(parent), f"{parent}." if parent else ""
    names = (f"{own}{number or ''}" for number in range(first, 10**6))
    return prefix + next(name for name in names if not hasattr(place, name))


def _borrowing(node: fx.Node, root: nn.Module, kind: str) -> tuple[str, QuantizedLayer] | None:
    """A new layer with a borrowed weight, and its name; None if the weight depends on the pictures, or is a buffer."""
    parts = {"weight": node.args[1], "bias": (*node.args, None, None)[2]}
    nodes = {own: one for own, one in parts.items() if isinstance(one, fx.Node)}
    if kind not in _BORROWING or "weight" not in nodes or any(one.meta["depends"] for one in nodes.values()):
        return None
    sources = {own: _source(one, root) for own, one in nodes.items()}
    if not all(sources.values()):
        return None
    keys = {key for source in sources.values() if source for key in source.keys}
    values = {key: operator.attrgetter(key)(root) for key in keys}
    owned = [values[source.keys[0]] for source in sources.values() if source and source.function is None]
    if not all(isinstance(one, nn.Parameter) for one in owned):
        return None  # a fixed filter, such as a blur's
    ours = _made(_OURS[kind], nodes["weight"].meta["val"], "bias" in nodes, _how(node))
    ours.borrow(sources, values)
    base = str(getattr(nodes["weight"], "target", "")).rpartition(".")[2]
    named = base.removesuffix("_weight") if base.endswith("_weight") else kind
    return _free_name(root, stack(node)[1], named, 0), ours.train(False)


def _source(node: fx.Node, root: nn.Module) -> Lender | None:
    """The source of a weight; None if it depends on the number or size of pictures."""
    if node.op == "get_attr":
        return Lender((str(node.target),))
    needed: set[fx.Node] = set()
    front = [node]
    while front:
        one = front.pop()
        needed.add(one)
        front += [more for more in one.all_input_nodes if more not in needed]
    if any(one.op not in ("get_attr", "call_function") for one in needed):
        return None
    inner, keys, copies = fx.Graph(), list[str](), dict[fx.Node, Any]()
    for one in node.graph.nodes:
        if one in needed and one.op == "get_attr" and not str(one.target).startswith(CONSTANT):
            copies[one] = inner.placeholder(f"p{len(keys)}")
            keys.append(str(one.target))
    for one in node.graph.nodes:
        if one in needed and one.op == "call_function":
            copies[one] = inner.node_copy(one, copies.__getitem__)
        elif one in needed and one not in copies:
            copies[one] = inner.get_attr(str(one.target))
    inner.output(copies[node])
    constants = nn.Module()
    for one in inner.nodes:
        if one.op == "get_attr":
            constants.register_buffer(str(one.target), getattr(root, str(one.target)), persistent=False)
    function: Callable[..., Tensor] = fx.GraphModule(constants, inner)
    return Lender(tuple(keys), function)
