"""The cost of each node: the loss of the logits with only this node quantized, and with all others.

Alone, a node shows its own noise; left out, it shows the gain of keeping it float. Groups of nodes (layers, blocks,
stages, roles) are measured alike. A forward pass starts at the group's first node: the blocks before it replay their
outputs from the float model, or from the quantized one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import track
from swin_quant.quant.distance import Loss, decibels, distance, make_loss, noise, summed
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

    `profile`: SQNR in dB of each block's output, quantized against float. `forwards`: the work, in passes over all.
    """

    pictures: int
    overall: Loss
    groups: tuple[GroupLoss, ...]
    profile: Mapping[str, float]
    forwards: float


def group_by_layer(nodes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The names of nodes by the layer that they belong to."""
    layers: dict[str, list[str]] = {}
    for name in nodes:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return {layer: tuple(names) for layer, names in layers.items()}


def list_groups(nodes: Mapping[str, Quantizer], blocks: Iterable[str] = (), stages: Iterable[str] = ()) -> list[Group]:
    """Every node by itself; the nodes of each layer, block and stage, by name; and of each role."""
    found: list[Group] = [(NODE, name, (name,)) for name in nodes]
    found += [(LAYER, layer, names) for layer, names in group_by_layer(nodes).items()]
    for kind, places in ((BLOCK, blocks), (STAGE, stages)):
        inside = {place: tuple(name for name in nodes if name.startswith(f"{place}.")) for place in places}
        found += [(kind, place, names) for place, names in inside.items() if names]
    roles = {role: tuple(name for name, node in nodes.items() if node.role in ROLES[role.value]) for role in Role}
    return found + [(ROLE, f"role:{role.value}", names) for role, names in roles.items() if names]


def sensitivity(
    model: nn.Module,
    batches: Sequence[Tensor],
    blocks: Mapping[str, nn.Module],
    stages: Iterable[str] = (),
    reference: nn.Module | None = None,
) -> Sensitivity:
    """Measure the enabled nodes of a model, and the groups that they form.

    Afterwards the model is as before, nodes off.

    Args:
        model: A calibrated model under a policy.
        batches: Images [B, channels, S, S].
        blocks: Modules that run one after another and take one tensor; they save time and do not change the result.
        stages: Names of modules that are groups.
        reference: The float network that logits are compared with. None: the model with its nodes off.

    Raises:
        SwinQuantError: no node is on, or there is no picture.
    """
    device = next(model.parameters()).device
    rows: list[list[list[float]]] = []
    computed = 0
    with _measuring(model) as nodes:
        groups = list_groups(nodes, blocks, stages)
        for number, images in enumerate((batch.to(device) for batch in batches), 1):
            batch = _Batch(model, nodes, list(blocks.values()), images)
            if reference is not None:
                batch.expected = reference(images)
            row = [distance(batch.logits, batch.expected)]
            row += [list(noise(y.double(), x.double())) for y, x in zip(batch.quantized, batch.floats, strict=True)]
            work = f"measuring nodes, batch {number} of {len(batches)}"
            for *_, names in track(groups, work, len(groups), "groups"):
                row += [batch.alone(names), batch.without(names)]
            rows.append(row)
            computed += batch.computed
    if not rows:
        raise SwinQuantError("there was no picture to measure with: check ‹data_path›")
    overall, *others = zip(*rows, strict=True)  # each with a list of figures for every batch
    depth, pairs = others[: len(blocks)], others[len(blocks) :]
    losses = [make_loss(one) for one in pairs]
    return Sensitivity(
        int(summed(overall)[-1]),
        make_loss(overall),
        tuple(GroupLoss(*group, *both) for group, *both in zip(groups, losses[::2], losses[1::2], strict=True)),
        {block: decibels(*summed(one)) for block, one in zip(blocks, depth, strict=True)},
        computed / ((len(blocks) + 1) * len(rows)),  # the rest after the last block counts as one more
    )


def layer_losses(model: nn.Module, images: Tensor, blocks: Mapping[str, nn.Module]) -> dict[str, Loss]:
    """The loss with only the enabled nodes of one layer quantized, by layer; arguments as in `sensitivity`."""
    with _measuring(model) as nodes:
        layers = group_by_layer(nodes)
        batch = _Batch(model, nodes, list(blocks.values()), images)
        tracked = track(layers.items(), "measuring layers", len(layers), "layers")
        return {layer: make_loss([batch.alone(names)]) for layer, names in tracked}


@contextmanager
def _measuring(model: nn.Module) -> Iterator[dict[str, Quantizer]]:
    """Inside the context, a model whose enabled nodes, which it gives, may be switched; afterwards all are off."""
    if not (nodes := enabled_nodes(model)):
        raise SwinQuantError("no node is on: choose a ‹policy› that quantizes something")
    try:
        with torch.inference_mode(), eval_mode(model):
            yield nodes
    finally:
        dequantize(model)


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
        # How many blocks have run at a node's first call
        noted = watching(nodes, lambda name, *_: self.begins.setdefault(name, len(self.floats)))
        with recorded(parts) as self.floats, noted:
            self.expected = self._forward(0)
        quantize(model)
        with recorded(parts) as self.quantized:
            self.logits = self._forward(0)

    def alone(self, names: Sequence[str]) -> list[float]:
        """The sums of `distance` with only these nodes quantized."""
        return self._switched(names, State.QUANTIZE, State.OFF, self.floats)

    def without(self, names: Sequence[str]) -> list[float]:
        """The sums of `distance` with all nodes but these quantized."""
        return self._switched(names, State.OFF, State.QUANTIZE, self.quantized)

    def _switched(self, names: Sequence[str], inside: State, outside: State, before: Sequence[Tensor]) -> list[float]:
        begin = min(self.begins[name] for name in names)
        for name, node in self.nodes.items():
            node.state = inside if name in names else outside
        with replayed(self.parts, before[:begin]):
            return distance(self._forward(begin), self.expected)

    def _forward(self, begin: int) -> Tensor:
        self.computed += len(self.parts) + 1 - begin
        return self.model(self.images)
