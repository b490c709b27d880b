"""Outlier channels, which widen a tensor's range for all other channels: where they are, and whether a pass can move
them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import LOOKED_AT, open_exchanges, outliers
from swin_quant.quant.passes.units import through
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.quant.straight_through import simulate
from swin_quant.quant.watch import Visit, watching

UNREACHED = 5.0  # times the 90 % quantile of channels (hidden ones may be dead): trained micro models reach 2.6
LOST_DB = 25.0  # SQNR of a node: micro models keep 26 where nothing is lost, 23 where mode 1 lost 7 dB of logits
_BY_ROW = (Role.GEMM_OUTPUT, Role.GEMM_WEIGHT)
_BY_CHANNEL = (Role.GEMM_INPUT, Role.ONE_SIDED_INPUT, Role.GEMM_OUTPUT)  # channels are their last dimension


@dataclass(frozen=True)
class OutlierChannels:
    """Channels `times` as large as others at `place`, a module or node.

    `cure`: the layers between which equalization can move their size, if any. `tried`: it was tried, and no unit got
    better. Without a cure: the `channels`, largest first, and the SQNR of all others on the node's grid, `rest_db`.
    """

    place: str
    times: float
    cure: tuple[str, ...] = ()
    tried: bool = False
    channels: tuple[int, ...] = ()
    rest_db: float = math.inf


def outlier_channels(context: PassContext, exchanged: bool, tried: bool = False) -> list[OutlierChannels]:
    """The outlier channels of the network in `context`; if all were `exchanged`, those that no exchange reaches.

    `tried`: exchanges were tried and nothing got better; then only channels beside enabled nodes.
    """
    enabled, found = enabled_nodes(context.model), list[OutlierChannels]()
    if not exchanged:
        cures: dict[str, tuple[str, ...]] = {}
        for exchange in context.exchanges:
            parts = (*exchange.before, *exchange.after, *([exchange.offset] if exchange.offset else []))
            cures.setdefault(exchange.scaled.name, tuple(dict.fromkeys(_owner(part.name) for part in parts)))
        on = {name for node in enabled for name in (node, _owner(node))}
        found += [
            OutlierChannels(name, times, cures[name], tried)
            for name, times in outliers(context, LOOKED_AT).items()
            if not tried or on & {name, *cures[name]}
        ]
    # No exchange rescales these. Those in weights with one range for all rows, and in nodes whose channels were already
    # exchanged as well as possible, count if they ruin other channels.
    reached = {_owner(part.name) for exchange in open_exchanges(context) for part in exchange.after}
    moved = {_owner(part.name) for exchange in open_exchanges(context) for part in exchange.before}
    nodes: dict[str, Quantizer] = {}
    unreached: set[str] = set()
    for name, node in enabled.items():
        if isinstance(context.model.get_submodule(_owner(name)), nn.Linear):
            fixed = _owner(name) not in (moved if node.role in _BY_ROW else reached)
            if fixed or exchanged or tried:
                nodes[name] = node
            if fixed and node.role is not Role.GEMM_WEIGHT:
                unreached.add(name)
    sizes: dict[str, Tensor] = {}

    def measure(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        size = y.detach().flatten(0, -2).abs().amax(0).float()
        sizes[name] = torch.maximum(sizes[name], size) if name in sizes else size

    _see(context, nodes, measure)
    times = dict.fromkeys(sizes, 1.0)
    for name, size in sizes.items():
        if len(alive := size[size > 0]):
            times[name] = (size.max() / torch.quantile(alive, 0.9)).item()
    wide = {name: nodes[name] for name in sizes if times[name] > UNREACHED}
    large = {name: sizes[name] > UNREACHED * sizes[name].max() / times[name] for name in wide}
    rest = dict.fromkeys(wide, (0.0, 0.0))

    def lose(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        node, y = nodes[name], y.detach()[..., ~large[name]].float()
        ranged = node.amax is not None and (node.setting.symmetric or node.bounds is not None)
        signal, wrong = noise(simulate(y, node.range_for(), *node.grid).double() if ranged else y, y.double())
        rest[name] = rest[name][0] + signal, rest[name][1] + wrong

    _see(context, wide, lose)
    for name in wide:
        if (rest_db := decibels(*rest[name])) < LOST_DB or name in unreached:
            channels = tuple(one for one in sizes[name].argsort(descending=True).tolist() if large[name][one])
            found.append(OutlierChannels(name, times[name], channels=channels, rest_db=rest_db))
    return found


def _see(context: PassContext, nodes: Mapping[str, Quantizer], visit: Visit) -> None:
    """Visit the inputs of nodes, channels last, in one forward pass, and the rows of weights that share a range."""
    activations = {name: node for name, node in nodes.items() if node.role in _BY_CHANNEL}
    if activations:
        with watching(activations, visit):
            through(context.model, context.first(LOOKED_AT))
    for name, node in nodes.items():
        if node.role is Role.GEMM_WEIGHT and not (node.setting.per_channel or node.setting.block):
            visit(name, node, (), context.model.get_parameter(f"{_owner(name)}.weight").T)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
