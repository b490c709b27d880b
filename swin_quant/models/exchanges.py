"""Find the places in a captured network's graph where factors and offsets can move (`quant.passes.places`).

Such a place is a layer whose channels only other layers read, through functions that give k y for k x (cross-layer
equalization: Nagel et al., 2019), or a norm that only layers read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx, nn

from swin_quant.models.placement import SIZES, word_of
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes.places import Exchange, Part, of_norm

# Modules and functions that give k y for k x, channel by channel, for every k above zero.
HOMOGENEOUS = frozenset(
    "identity dropout dropout2d droppath contiguous clone relu leakyrelu maxpool2d maxpool2dsame avgpool2d "
    "avgpool2dsame adaptiveavgpool2d adaptivemaxpool2d flatten folded".split()
)
STILL = frozenset("identity dropout droppath contiguous clone".split())  # give their input unchanged in evaluation


def exchanges(graph: fx.Graph, root: nn.Module, norms: Mapping[str, str]) -> Iterator[Exchange]:
    """The exchanges of a graph whose layers are ours. `norms`: batch norms that are folded into layers (`foldable`)."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or calls.count(name) > 1:
            continue
        module = root.get_submodule(name)
        if isinstance(module, QuantizedLayer):
            readers = _readers(node, root, HOMOGENEOUS, norms, len(module.weight))
            if readers:
                parts = tuple(Part(f"{name}.{kind}") for kind in ("weight", "bias"))
                yield Exchange(_seen_by(readers[0]), parts, tuple(_columns(root, reader) for reader in readers))
        elif isinstance(module, nn.LayerNorm):  # a norm without weights is no place, but can be named
            readers = _readers(node, root, STILL, {}, module.normalized_shape[0])
            if readers:
                found = of_norm(name, tuple(readers))
                if not all(isinstance(root.get_submodule(reader), nn.Linear) for reader in readers):
                    found = replace(found, offset=None, into=())  # padding is zero, whatever the offset
                after = tuple(_columns(root, reader) for reader in readers)
                yield replace(found, scaled=_seen_by(readers[0]), after=after)


def _readers(
    node: fx.Node, root: nn.Module, through: frozenset[str], norms: Mapping[str, str], channels: int
) -> list[str]:
    """The layers that alone read the output of `node`, channel by channel; none if anything else reads it."""
    found: list[str] = []
    for user in node.users:
        if word_of(user, root) in SIZES:
            continue
        layer = root.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(layer, QuantizedLayer):
            more = [str(user.target)] if _channels_in(layer) == channels else []
        elif str(user.target) in norms or word_of(user, root) in through:
            more = _readers(user, root, through, norms, channels)
        else:
            more = []
        if not more:
            return []
        found += more
    return found


def _channels_in(layer: QuantizedLayer) -> int:
    """The number of channels with weights of their own; 0 where groups mix them."""
    if getattr(layer, "groups", 1) == 1:
        return layer.weight.shape[1]
    return len(layer.weight) if layer.groups == len(layer.weight) and layer.weight.shape[1] == 1 else 0


def _columns(root: nn.Module, reader: str) -> Part:
    """The weights that multiply channels: the rows, for a depthwise convolution."""
    return Part(f"{reader}.weight", dim=0 if getattr(root.get_submodule(reader), "groups", 1) > 1 else 1)


def _seen_by(reader: str) -> Part:
    return Part(f"{reader}._input_quantizer")
