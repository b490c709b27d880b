"""Channels that make the range of a tensor wide for all others: where they are, and whether anything can move them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.quant.passes.equalize import outliers
from swin_quant.quant.passes.kind import Workpiece
from swin_quant.quant.passes.units import through
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Role
from swin_quant.quant.watch import watching

PICTURES = 8  # one forward of the float model
UNREACHED = 5.0  # times what 90 % of channels keep within, since hidden ones may be dead: trained micro models, 2.6
_BY_CHANNEL = (Role.GEMM_INPUT, Role.ONE_SIDED_INPUT, Role.GEMM_OUTPUT)  # their last dimension is one of channels


@dataclass(frozen=True)
class Standout:
    """Channels that stand out, `times` as large as others, where `place` shows them. `cure`: the layers between which
    equalization can move their size; empty where there are none. `tried`: it has, and no unit was better for it.
    """

    place: str
    times: float
    cure: tuple[str, ...] = ()
    tried: bool = False


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
    return found + [Standout(name, times) for name, times in _unreached(piece).items() if times > UNREACHED]


def _unreached(piece: Workpiece) -> dict[str, float]:
    """Node -> largest channel over most others, of the enabled ones whose channels no exchange can rescale."""
    reached = {_owner(part.name) for exchange in piece.exchanges for part in exchange.after}
    moved = {_owner(part.name) for exchange in piece.exchanges for part in exchange.before}
    nodes: dict[str, nn.Module] = {
        name: node
        for name, node in enabled_nodes(piece.model).items()
        if node.role in _BY_CHANNEL
        and isinstance(piece.model.get_submodule(_owner(name)), nn.Linear)
        and _owner(name) not in (moved if node.role is Role.GEMM_OUTPUT else reached)
    }
    largest: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        size = y.detach().flatten(0, -2).abs().amax(0).float()
        largest[name] = torch.maximum(largest[name], size) if name in largest else size

    if nodes:
        with watching(nodes, look):
            through(piece.model, piece.first(PICTURES))
    return {name: _times(size) for name, size in largest.items()}


def _times(size: Tensor) -> float:
    alive = size[size > 0]
    return (size.max() / torch.quantile(alive, 0.9)).item() if len(alive) else 1.0


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
