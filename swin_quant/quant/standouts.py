"""Channels that make the range of a tensor wide for all others: where they are, and whether anything can move them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.quant.distance import decibels
from swin_quant.quant.passes.equalize import open_exchanges, outliers
from swin_quant.quant.passes.kind import Workpiece
from swin_quant.quant.passes.units import through
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role
from swin_quant.quant.straight_through import simulate
from swin_quant.quant.watch import watching

PICTURES = 8  # one forward of the float model
UNREACHED = 5.0  # times what 90 % of channels keep within, since hidden ones may be dead: trained micro models, 2.6
LOST_DB = 20.0  # of a node: four bits; micro models keep 30 and more where nothing stands out
_BY_ROW = (Role.GEMM_OUTPUT, Role.GEMM_WEIGHT)
_BY_CHANNEL = (Role.GEMM_INPUT, Role.ONE_SIDED_INPUT, Role.GEMM_OUTPUT)  # their last dimension is one of channels


@dataclass(frozen=True)
class Standout:
    """Channels that stand out, `times` as large as others, where `place` shows them. `cure`: the layers between which
    equalization can move their size; empty where there are none. `tried`: it has, and no unit was better for it.
    Where no cure is: which `channels`, largest first, and the SQNR that all others keep on the node's grid, `rest_db`.
    """

    place: str
    times: float
    cure: tuple[str, ...] = ()
    tried: bool = False
    channels: tuple[int, ...] = ()
    rest_db: float = math.inf


def standouts(piece: Workpiece, exchanged: bool, tried: bool = False) -> list[Standout]:
    """What stands out of the network of `piece` as it is; only where no exchange reaches, if all were `exchanged`.

    `tried`: they were, and nothing was better for it; then only beside nodes that are on.
    """
    found: list[Standout] = []
    if not exchanged:
        cures: dict[str, tuple[str, ...]] = {}
        for exchange in piece.exchanges:
            parts = (*exchange.before, *exchange.after, *([exchange.offset] if exchange.offset else []))
            cures.setdefault(exchange.shown.name, tuple(dict.fromkeys(_owner(part.name) for part in parts)))
        on = {name for node in enabled_nodes(piece.model) for name in (node, _owner(node))} if tried else set()
        found += [
            Standout(name, times, cures[name], tried)
            for name, times in outliers(piece, PICTURES).items()
            if not tried or on & {name, *cures[name]}
        ]
    return found + _left(piece, exchanged or tried)


def _left(piece: Workpiece, exchanged: bool) -> list[Standout]:
    """What stands out of enabled nodes that no exchange can rescale; where the others are lost by it, also of weights
    with one range for all rows, and of nodes whose channels were `exchanged` as well as they can be."""
    reached = {_owner(part.name) for exchange in open_exchanges(piece) for part in exchange.after}
    moved = {_owner(part.name) for exchange in open_exchanges(piece) for part in exchange.before}
    nodes: dict[str, Quantizer] = {}
    unreached: set[str] = set()
    for name, node in enabled_nodes(piece.model).items():
        if isinstance(piece.model.get_submodule(_owner(name)), nn.Linear):
            fixed = _owner(name) not in (moved if node.role in _BY_ROW else reached)
            if fixed or exchanged:
                nodes[name] = node
            if fixed and node.role is not Role.GEMM_WEIGHT:
                unreached.add(name)
    sums: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        y = y.detach().flatten(0, -2).float()
        found = _sums(nodes[name], y)
        if name in sums:
            found = torch.cat([torch.maximum(sums[name][:1], found[:1]), sums[name][1:] + found[1:]])
        sums[name] = found

    activations = {name: node for name, node in nodes.items() if node.role in _BY_CHANNEL}
    if activations:
        with watching(activations, look):
            through(piece.model, piece.first(PICTURES))
    found = [_standout(name, each) for name, each in sums.items()]
    for name, node in nodes.items():
        if node.role is Role.GEMM_WEIGHT and not (node.per_channel or node.block):
            weight = piece.model.get_parameter(f"{_owner(name)}.weight").detach().float()
            found.append(_standout(name, _sums(node, weight.T)))
    return [one for one in found if one.times > UNREACHED and (one.place in unreached or one.rest_db < LOST_DB)]


def _sums(node: Quantizer, y: Tensor) -> Tensor:
    """Of each channel of `y` [values, channels]: the largest magnitude, and the energy of what is there and of what
    the node's grid makes wrong, [3, channels] float64; nothing is wrong where it has no range."""
    ranged = node.amax is not None and (node.symmetric or node.bounds is not None)
    wrong = simulate(y, node.tensor_range, *node.grid) - y if ranged else torch.zeros_like(y)
    return torch.stack([y.abs().amax(0).double(), y.double().square().sum(0), wrong.double().square().sum(0)])


def _standout(name: str, sums: Tensor) -> Standout:
    size, signal, noise = sums
    alive = size[size > 0]
    if not len(alive):
        return Standout(name, 1.0)
    usual = torch.quantile(alive, 0.9)
    large = size > UNREACHED * usual
    channels = tuple(channel for channel in size.argsort(descending=True).tolist() if large[channel])
    kept = decibels(signal[~large].sum().item(), noise[~large].sum().item())
    return Standout(name, (size.max() / usual).item(), channels=channels, rest_db=kept)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
