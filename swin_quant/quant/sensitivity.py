"""The cost of each node: the loss of the logits with only this node quantized, and with all others.

Alone, a node shows its own noise; left out, it shows the gain of keeping it float. Groups of nodes (layers, blocks,
stages, roles) are measured alike. A forward pass starts at the group's first node: the blocks before it replay their
outputs from the float model, or from the quantized one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.base.distributed import gather
from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.distance import Loss, decibels, distance, loss_of, noise, summed
from swin_quant.quant.policy import ROLES, dequantize, enabled_nodes, quantize
from swin_quant.quant.quantizer import Quantizer, Role, State
from swin_quant.quant.watch import eval_mode, watching


@contextmanager
def recorded(parts: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside the context, a list of the outputs of `parts`, which run one after another, in a forward pass."""
    outputs: list[Tensor] = []
    with watching({str(number): part for number, part in enumerate(parts)}, lambda *seen: outputs.append(seen[-1])):
        yield outputs


@contextmanager
def replayed(parts: Sequence[nn.Module], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside the context, the first `len(outputs)` of `parts` return `outputs` for any input.

    Modules between them compute as usual, from the output of the part before.
    """
    skipped = list(zip(parts, outputs, strict=False))
    for part, output in skipped:
        part.forward = lambda *inputs, _output=output: _output
    try:
        yield
    finally:
        for part, _ in skipped:
            del part.forward


NODE, LAYER, BLOCK, STAGE, ROLE = "node", "layer", "block", "stage", "role"
Group = tuple[str, str, tuple[str, ...]]  # kind, name, nodes


@dataclass(frozen=True)
class GroupLoss:
    """The loss with only these nodes quantized, and with all others; `kind` and `name` of the group."""

    kind: str
    name: str
    nodes: tuple[str, ...]
    alone: Loss
    without: Loss


@dataclass(frozen=True)
class Sensitivity:
    """The losses of every group, in the model's order, and of all nodes together.

    `profile`: SQNR in dB of each block's output, quantized against float. `forwards`: the work, in forward passes of
    the whole model over all pictures.
    """

    pictures: int
    overall: Loss
    groups: tuple[GroupLoss, ...]
    profile: Mapping[str, float]
    forwards: float

    def of(self, kind: str) -> list[GroupLoss]:
        """The groups of a kind, the costliest first: without them the logits are nearest to float's."""
        return sorted((group for group in self.groups if group.kind == kind), key=lambda group: -group.without.sqnr_db)


def groups_of(nodes: Mapping[str, Quantizer], blocks: Iterable[str] = (), stages: Iterable[str] = ()) -> list[Group]:
    """Every node by itself; the nodes of each layer, block and stage, by name; and of each role."""
    found: list[Group] = [(NODE, name, (name,)) for name in nodes]
    layers: dict[str, list[str]] = {}
    for name in nodes:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    found += [(LAYER, layer, tuple(names)) for layer, names in layers.items()]
    for kind, places in ((BLOCK, blocks), (STAGE, stages)):
        inside = {place: tuple(name for name in nodes if name.startswith(f"{place}.")) for place in places}
        found += [(kind, place, names) for place, names in inside.items() if names]
    roles = {role: tuple(name for name, node in nodes.items() if node.role in ROLES[role.value]) for role in Role}
    return found + [(ROLE, f"role:{role.value}", names) for role, names in roles.items() if names]


def sensitivity(
    model: nn.Module,
    batches: Iterable[tuple[int, Tensor]],
    blocks: Mapping[str, nn.Module],
    stages: Iterable[str] = (),
    tell: Callable[[Iterable[int], int], Iterable[int]] = lambda numbers, total: numbers,
    kinds: Sequence[str] = (NODE, LAYER, BLOCK, STAGE, ROLE),
    reference: nn.Module | None = None,
) -> Sensitivity:
    """Measure the enabled nodes of the model on this rank's share of (number, images [B, channels, S, S]).

    `blocks` run one after another and take one tensor; they save time and do not change the result. `tell` iterates
    over the numbers of groups, for a progress bar. `reference`: the float network that logits are compared with, None:
    the model with its nodes off. Afterwards the model is as before, nodes off. The result is the same
    on any number of ranks. SwinQuantError if no node is on, or there is no picture.
    """
    nodes, parts = enabled_nodes(model), list(blocks.values())
    if not nodes:
        raise SwinQuantError("no node is on: choose a ‹policy› that quantizes something")
    groups = [group for group in groups_of(nodes, blocks, stages) if group[0] in kinds]
    rows: list[tuple[int, list[list[float]]]] = []
    computed = 0
    try:
        with torch.inference_mode(), eval_mode(model):
            for number, images in batches:
                batch = _Batch(model, nodes, parts, images)
                if reference is not None:
                    batch.expected = reference(images)
                measured = [batch.overall(), *batch.profile()]
                for index in tell(range(len(groups)), len(groups)):
                    measured += batch.both(groups[index][2])
                rows.append((number, measured))
                computed += batch.computed
    finally:
        dequantize(model)
    return _result(rows, computed, groups, list(blocks))


def _result(
    mine: list[tuple[int, list[list[float]]]],
    computed: int,
    groups: list[Group],
    blocks: list[str],
) -> Sensitivity:
    rows = [row for _, row in sorted(gather(mine), key=lambda row: row[0])]
    if not rows:
        raise SwinQuantError("there was no picture to measure with: check ‹data_path› and ‹pictures›")
    overall, *others = zip(*rows, strict=True)  # each with a list of figures for every batch
    depth, pairs = others[: len(blocks)], others[len(blocks) :]
    losses = [loss_of(one) for one in pairs]
    units = len(blocks) + 1  # the rest after the last block counts as one more
    return Sensitivity(
        int(summed(overall)[-1]),
        loss_of(overall),
        tuple(
            GroupLoss(kind, name, names, alone, without)
            for (kind, name, names), alone, without in zip(groups, losses[::2], losses[1::2], strict=True)
        ),
        {block: decibels(*summed(one)) for block, one in zip(blocks, depth, strict=True)},
        sum(gather([computed])) / (units * len(rows)),
    )


class _Batch:
    """One batch: the outputs of all blocks in the float and the quantized model, and forward passes that start at any
    block."""

    def __init__(
        self, model: nn.Module, nodes: Mapping[str, Quantizer], parts: Sequence[nn.Module], images: Tensor
    ) -> None:
        self.model, self.nodes, self.parts, self.images = model, nodes, parts, images
        self.computed = 0
        self.begins: dict[str, int] = {}
        dequantize(model)
        with recorded(parts) as self.floats, watching(nodes, self._note):
            self.expected = self._forward(0)
        quantize(model)
        with recorded(parts) as self.quantized:
            self.logits = self._forward(0)

    def overall(self) -> list[float]:
        return distance(self.logits, self.expected)

    def profile(self) -> list[list[float]]:
        pairs = zip(self.quantized, self.floats, strict=True)
        return [list(noise(one.double(), other.double())) for one, other in pairs]

    def both(self, names: Sequence[str]) -> list[list[float]]:
        """The sums of `distance` with only these nodes quantized, and with all others."""
        begin = min(self.begins[name] for name in names)
        found = []
        for inside, outside, outputs in (
            (State.QUANTIZE, State.OFF, self.floats),
            (State.OFF, State.QUANTIZE, self.quantized),
        ):
            for name, node in self.nodes.items():
                node.state = inside if name in names else outside
            with replayed(self.parts, outputs[:begin]):
                found.append(distance(self._forward(begin), self.expected))
        return found

    def _forward(self, begin: int) -> Tensor:
        self.computed += len(self.parts) + 1 - begin
        return self.model(self.images)

    def _note(self, name: str, *_: object) -> None:
        """Note how many blocks have run at a node's first call."""
        self.begins.setdefault(name, len(self.floats))
