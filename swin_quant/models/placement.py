"""The places of nodes in a captured network, as data: operations that multiply or add, keep a range, or are one-sided.

As in NNCF's quantizer propagation, a node stands before an operation that engines run in int8. Its role depends on the
operation that its range comes from, which is found upstream, through operations that keep a range. Two nodes with the
same origin see the same range, and engines merge them. Tables name an operation by the class of its module, or by its
name in ATen, in small letters without underscores. Policies name roles alone.

Each product of the network is listed with its kind, its nodes, and the reason if it has none (`coverage`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from swin_quant.models.capture import packet, stack
from swin_quant.models.plain_operations import einsum_extents
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.quantizer import Quantizer, Role

CONVOLUTIONS = frozenset("conv1d conv2d conv3d quantconv1d quantconv2d quantconv3d".split())
LAYERS = CONVOLUTIONS | {"linear", "quantlinear", "quantconvtranspose2d"}
NORMS = frozenset({"batchnorm1d", "batchnorm2d", "batchnorm3d"})
MATMULS = frozenset({"matmul", "bmm"})
ADDS = frozenset({"add"})
AVERAGES = frozenset({"adaptiveavgpool2d", "avgpool2d", "mean"})
SIDES = ("_left", "_right")
# Operations that keep the range of their input, or shrink it a little.
RANGE_KEEPING = frozenset(
    "identity dropout dropout2d droppath contiguous clone to flatten unflatten reshape view viewas permute transpose "
    "movedim swapaxes squeeze unsqueeze expand expandas repeat getitem select slice narrow index indexselect unbind "
    "split splitwithsizes chunk roll pad constantpadnd zeropad2d reflectionpad2d replicationpad2d "
    "maxpool2d maxpool2dwithindices "
    "avgpool2d adaptiveavgpool1d adaptiveavgpool2d adaptivemaxpool2d mean amax upsamplenearest2d upsamplebilinear2d "
    "upsamplebicubic2d upsamplebilinear2daa upsamplebicubic2daa upsample pixelshuffle pixelunshuffle folded".split()
)
# Operations with almost no output below zero: after them, half of a symmetric grid would be idle.
ONE_SIDED = frozenset(
    "relu relu6 gelu gelutanh quickgelu silu swish mish hardswish hardsigmoid sigmoid softmax softplus elu celu "
    "hardtanh".split()
)
# Operations that engines fuse into the convolution before them, or move a node across, and zeros around a map, which
# the convolution behind adds (`backends.onnx.graph`).
MERGED = frozenset(
    "identity dropout relu relu6 hardtanh maxpool2d flatten reshape view permute transpose clone pad constantpadnd "
    "zeropad2d".split()
)
# Operations that make masks of attention, whose values may be infinite.
MASKS = frozenset({"maskedfill", "where"})
# Operations that read the size of a tensor, not its values.
SIZES = frozenset("getattr symsize symnumel symstride".split())
_MATMULS = frozenset("matmul bmm mm baddbmm addmm einsum".split())
_TRANSPOSED = "convtranspose"
_RECURRENT = frozenset("lstm gru rnntanh rnnrelu".split())
_LAYERS = _RECURRENT | set("linear conv1d conv2d conv3d convtranspose1d convtranspose2d convtranspose3d".split())
_MODULES = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)
_INT8 = frozenset("linear conv1d conv2d conv3d matmul bmm".split())


@dataclass(frozen=True)
class Place:
    """A node to insert before argument `argument` of the operation `at`, under `name`."""

    at: fx.Node
    argument: int
    role: Role
    name: str


def name_operation(node: fx.Node, root: nn.Module) -> str:
    """The operation of a node, in the words of the tables above."""
    if node.op == "call_module":
        text = type(root.get_submodule(str(node.target))).__name__
    else:
        text = packet(node) or getattr(node.target, "__name__", node.op) if node.op == "call_function" else node.op
    name = text.replace("_", "").lower()
    is_dropped = name.endswith(("droppath", "stochasticdepth"))  # as transformers and torchvision name theirs
    return "droppath" if is_dropped else name


def find_range_source(node: fx.Node, root: nn.Module) -> fx.Node:
    """The origin of the range of `node`'s output: upstream, through operations that keep a range."""
    while name_operation(node, root) in RANGE_KEEPING and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def input_role(node: fx.Node, root: nn.Module) -> Role:
    """The role of the input of a layer that reads `node`."""
    return Role.ONE_SIDED_INPUT if _is_one_sided(node, root) else Role.GEMM_INPUT


def _is_one_sided(node: fx.Node, root: nn.Module) -> bool:
    source = find_range_source(node, root)
    if name_operation(source, root) == "mul":  # a gate, as in squeeze and excite
        return all(isinstance(one, fx.Node) and _is_one_sided(one, root) for one in source.args)
    return name_operation(source, root) in ONE_SIDED


def output_role(node: fx.Node, root: nn.Module, norms: Mapping[str, str]) -> Role:
    """The role of a convolution's output, which depends on whether each reader has a node of its own."""
    for reader in node.users:
        word = name_operation(reader, root)
        if str(reader.target) in norms or word in MERGED:
            if output_role(reader, root, norms) is Role.CONV_OUTPUT:
                return Role.CONV_OUTPUT
        elif word not in LAYERS | ADDS | SIZES:
            return Role.CONV_OUTPUT
    return Role.GEMM_OUTPUT


def foldable(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Maps each batch norm that alone reads a layer to it, if both run once and nothing else reads their parameters."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    found = {}
    for node in graph.nodes:
        if name_operation(node, root) not in NORMS or node.op != "call_module" or not isinstance(node.args[0], fx.Node):
            continue
        layer = node.args[0]
        names = str(node.target), str(layer.target)
        alone = layer.op == "call_module" and len(layer.users) == 1 and all(calls.count(name) == 1 for name in names)
        alone = alone and read.isdisjoint(names)
        # Channels of a linear's last dimension are no norm's.
        last = name_operation(layer, root).endswith("linear") and layer.meta["val"].dim() > 2
        tracked = getattr(root.get_submodule(names[0]), "running_var", None) is not None
        if alone and tracked and not last and name_operation(layer, root) in LAYERS:
            found[names[0]] = names[1]
    return found


def places(graph: fx.Graph, root: nn.Module) -> Iterator[Place]:
    """The nodes outside layers: at products and additions of two activations, and at the average of a fused addition's
    output, which would otherwise be computed in float."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        word, inputs, roles = name_operation(node, root), _inputs(node), list[Role]()
        if word in AVERAGES and _averages_fused(node, root):
            kind, roles = "average", [input_role(inputs[0], root)]
        elif node.op == "call_function" and word in MATMULS | ADDS and len(inputs) == 2:
            # Both are computed from the values of the pictures, for each one, and are not the pictures themselves.
            active = all(one.meta["depends"] and one.op != "placeholder" for one in inputs)
            sources = [name_operation(find_range_source(one, root), root) for one in inputs]
            if not active or not all(has_batch(one) and is_real(one) for one in inputs):
                continue
            if word in MATMULS:
                kind = "matmul"
                roles = [Role.SOFTMAX_OUTPUT if source == "softmax" else Role.MATMUL_INPUT for source in sources]
            elif MASKS.isdisjoint(sources):
                fused = _is_fused(inputs, root)
                kind, roles = "add", [input_role(one, root) if fused else Role.RESIDUAL for one in inputs]
        if not roles:
            continue
        owner = stack(node)[1]
        counts[owner, kind] += 1
        for argument, (side, role) in enumerate(zip(SIDES if len(roles) == 2 else ("",), roles, strict=True)):
            name = f"{kind}{counts[owner, kind]}{side}_input_quantizer"
            yield Place(node, argument, role, f"{owner}.{name}" if owner else name)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's first two inputs; a constant is none."""
    return [one for one in node.args[:2] if isinstance(one, fx.Node)]


def _is_fused(inputs: Sequence[fx.Node], root: nn.Module) -> bool:
    """Whether only this addition reads a convolution: engines then add within it, if both sides are int8.

    The residual streams of transformers and ConvNeXt lose too much in int8, and stay float.
    """
    for node in inputs:
        keeping = RANGE_KEEPING | NORMS
        while len(node.users) == 1 and name_operation(node, root) in keeping and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if len(node.users) == 1 and name_operation(node, root) in CONVOLUTIONS:
            return True
    return False


def _averages_fused(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node averages the output of a fused addition, as in networks that end in residual blocks."""
    while inputs := _inputs(node)[:1]:
        node = inputs[0]
        if len(node.users) > 1:
            return False
        word = name_operation(node, root)
        if word in ADDS:
            return len(_inputs(node)) == 2 and _is_fused(_inputs(node), root)
        if word not in MERGED:
            return False
    return False


def is_real(node: fx.Node) -> bool:
    """Whether a node's output holds real numbers, which have a range: neither complex nor whole ones."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point()


def has_batch(node: fx.Node) -> bool:
    """Whether a dimension of a node's output, one tensor, depends on the number of pictures."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or any(isinstance(extent, torch.SymInt) for extent in value.shape)


@dataclass(frozen=True)
class Multiplication:
    """A multiplying operation: its kind, and its multiplications for a picture.

    `nodes`: the quantizers of its factors; `reason`: why it has none.
    """

    kind: str
    multiplications: int
    nodes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """How much of a network is quantized under a policy. `left`: the number of other products by kind and reason."""

    quantized: int
    products: int
    share: float
    left: dict[str, int]

    def __str__(self) -> str:
        share = f"{100 * self.share:.0f} % of the multiplications"
        text = f"{self.quantized} of {self.products} products are quantized, {share}"
        left = ", ".join(f"{count} {reason}" for reason, count in self.left.items())
        return f"{text}; float: {left}" if left else text


def coverage(products: Sequence[Multiplication], enabled: Collection[str]) -> Coverage:
    """The coverage of products by the enabled nodes."""
    done = [one for one in products if one.nodes and {*one.nodes} <= {*enabled}]
    left = Counter(f"{one.kind} ({one.reason or 'left out by the policy'})" for one in products if one not in done)
    total = sum(one.multiplications for one in products)
    return Coverage(len(done), len(products), sum(one.multiplications for one in done) / max(total, 1), dict(left))


def _reason(node: fx.Node, kind: str, reads_pictures: bool = False, weight_depends: bool = False) -> str:
    """Why a product has no nodes."""
    if kind not in _INT8:
        return "no int8 kind of it"
    if not all(has_batch(one) for one in node.all_input_nodes if one.meta["depends"]):
        return "mixes the pictures of a batch"
    if not all(map(is_real, node.all_input_nodes)):
        return "of complex or whole numbers"
    if reads_pictures:
        return "reads the pictures, left float"
    if kind in _MATMULS:
        return "a factor is no activation"
    if weight_depends:
        return "its weight depends on the pictures"
    return "its weight is a constant, shared or computed"


def products(graph: fx.Graph, root: nn.Module, pictures: int) -> Iterator[Multiplication]:
    """The products of a graph with nodes, captured with this many pictures."""
    for node in graph.nodes:
        if not node.meta.get("depends"):
            continue
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind, weight, nodes, reason = packet(node).replace("_", ""), None, tuple[str, ...](), ""
        if module is not None:
            kind = type(module).__name__.removeprefix("Quant").lower()
        if isinstance(module, QuantizedLayer):
            weight = module.weight
            nodes = tuple(f"{node.target}.{part}" for part in ("_input_quantizer", "_weight_quantizer"))
        elif isinstance(module, _MODULES):
            weight, reason = next(module.parameters()), _reason(node, kind, reads_pictures=True)
        elif kind in _LAYERS:
            about = node.args[1].meta if isinstance(node.args[1], fx.Node) else {}
            reads = find_range_source(cast(fx.Node, node.args[0]), root).op == "placeholder"
            weight, reason = about.get("val"), _reason(node, kind, reads, bool(about.get("depends")))
        elif kind in _MATMULS:
            given = [one for one in _inputs(node) if one.op == "call_module"]
            given = [one for one in given if isinstance(root.get_submodule(str(one.target)), Quantizer)]
            nodes = tuple(str(one.target) for one in given) if len(given) == 2 else ()
            reason = "" if nodes else _reason(node, kind)
        else:
            continue
        yield Multiplication(kind, _count_macs(kind, node, weight) // pictures, nodes, reason)


def _count_macs(kind: str, node: fx.Node, weight: Any = None) -> int:
    """The multiplications of a product for the pictures of the capture; 0 where its sizes are not known."""

    def count(*extents: Any) -> int:
        sizes = (one.node.hint if isinstance(one, torch.SymInt) else one for one in extents)
        return math.prod(map(int, sizes))

    if kind == "einsum":  # all factors at once
        return math.prod(max(map(count, extents)) for extents in einsum_extents(node).values())
    given: Any = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    out = node.meta.get("val")
    if kind in _RECURRENT and node.op == "call_function":  # each step of the input with every matrix
        weights = [one.meta["val"] for one in cast(Sequence[fx.Node], node.args[2])]
        return count(*given.shape[:-1]) * sum(one.numel() for one in weights if one.dim() == 2)
    if not isinstance(out, Tensor) or not isinstance(given, Tensor):
        return 0
    if kind in _MATMULS:
        return count(*out.shape, given.shape[-1])
    if not isinstance(weight, Tensor):
        return 0
    if _TRANSPOSED in kind:  # each input multiplies the weights of its channel
        return count(*given.shape) * (weight.numel() // count(given.shape[1]))
    return count(*out.shape) * (weight.numel() // weight.shape[0])
