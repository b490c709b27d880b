"""What a search measures of each layer: its loss in fake-quant on pictures, and what it saves on an engine."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from swin_quant.base.distributed import World, world_on
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log, track
from swin_quant.cards.lineage import find_original
from swin_quant.model import Model
from swin_quant.models.registry import blocks_or_units
from swin_quant.quant.distance import Loss, distance, make_loss
from swin_quant.quant.policy import Policy, Rule, apply_policy, dequantize, enabled_nodes, quantize
from swin_quant.quant.sensitivity import group_by_layer, layer_losses
from swin_quant.score.baseline import load_original
from swin_quant.verbs.sensitivity import Sample
from swin_quant.verbs.timing import Timer

_ALONE = 16  # pictures on which each layer is measured alone
_CHOOSING = 4  # one picture in so many chooses, the others confirm
# The factor from the drop on training pictures to that on unseen ones, of which a network is less sure: of micro
# models under eight policies, 1.0 to 2.0 times as many val as training pictures changed class.
_UNSEEN = 2.0
_LEAST = 1e-6  # of all layers' milliseconds: counts as the saving of a layer that saves nothing


class Layer(NamedTuple):
    """The nodes of a layer, which are switched together.

    `sqnr_db`: of the logits with only them quantized. `saved_ms`: what they save on the engine, maybe negative.
    """

    name: str
    nodes: tuple[str, ...]
    sqnr_db: float
    saved_ms: float


def in_order(layers: Sequence[Layer]) -> list[Layer]:
    """Layers that int8 makes slower first, then by error for each millisecond saved, the largest first."""
    least = _LEAST * max(1e-9, sum(abs(layer.saved_ms) for layer in layers))

    def cost(layer: Layer) -> tuple[bool, float]:
        return layer.saved_ms < 0, 10 ** (-layer.sqnr_db / 10) / max(layer.saved_ms, least)

    return sorted(layers, key=cost, reverse=True)


def without(base: Policy, layers: Sequence[Layer]) -> Policy:
    """The base policy with these layers left float."""
    off = Rule(disable=tuple(node for layer in layers for node in layer.nodes))
    return replace(base.and_then(off), name=f"{base.name} less {len(layers)} layers") if layers else base


class Losses:
    """Losses of a calibrated model under policies, beside the float network that the user had.

    A quarter of the pictures chooses among policies, and the others confirm: among many policies the one wins whose few
    differing pictures cost least by chance.
    """

    def __init__(self, model: Model, base: Policy, device: str, sample: Sample) -> None:
        total = sum(map(len, sample.batches))
        if total < 2:
            raise UsageError(f"‹pictures›: a search needs 2 at least, to choose and to confirm, and there are {total}")
        self.device, self.split = world_on(device).device, sample.split
        self.module = deepcopy(model.network).to(self.device).eval()
        if not self.nodes(base):
            raise UsageError(f"policy {base.name} quantizes nothing: there is nothing to leave float")
        batches = [part for batch in sample.batches for part in batch.split(max(1, min(16, total // _CHOOSING)))]
        dequantize(self.module)
        original = self._original(model)
        with torch.inference_mode():
            pairs = [(x, original(x.to(self.device))) for x in track(batches, "float logits", len(batches), "batches")]
        cut = max(1, len(pairs) // _CHOOSING)
        self.choosing, self.confirming = pairs[:cut], pairs[cut:]
        self.pictures = sum(len(images) for images, _ in self.confirming)

    def nodes(self, policy: Policy) -> list[str]:
        """The names of the nodes that a policy quantizes."""
        apply_policy(self.module, policy)
        return list(enabled_nodes(self.module))

    def choose(self, policy: Policy) -> Loss:
        """The loss on the pictures that choose; the confirmation counts the drop's error."""
        return replace(self._loss(policy, self.choosing), drop_error=0.0)

    def confirm(self, policy: Policy) -> Loss:
        """The loss on the pictures that did not choose."""
        return self._loss(policy, self.confirming)

    def _loss(self, policy: Policy, pairs: Sequence[tuple[Tensor, Tensor]]) -> Loss:
        """The drop is that to expect on pictures that the network does not know."""
        if self.nodes(policy):
            quantize(self.module)
        with torch.inference_mode():
            found = make_loss([distance(self.module(images.to(self.device)), logits) for images, logits in pairs])
        dequantize(self.module)
        times = _UNSEEN if self.split in ("train", "") else 1.0  # "": unknown, and perhaps training pictures
        return replace(found, drop=times * found.drop, drop_error=times * found.drop_error)

    def _original(self, model: Model) -> torch.nn.Module:
        """The float network that the user had, if passes changed the weights; a QAT model is its own original."""
        if (given := model.original) is not None:
            return deepcopy(given).to(self.device).eval()
        if model.card.is_qat or not model.card.has_own_weights:
            return self.module
        if file := find_original(model.card, [model.checkpoint.resolve().parent]):
            return load_original(model.config, file, World(device=self.device))[0].eval()
        told = "%s: losses are against its own weights: its float file is neither where its run card says nor beside it"
        log.warning(told, model.checkpoint)
        return self.module


def measure_layers(timer: Timer, losses: Losses) -> list[Layer]:
    """Measure the error of each layer alone, and the time of each group of layers once, left float.

    A group is all layers whose names differ in numbers alone, as those of a network's blocks do. Its layers share what
    it saves equally: the times of layers add up well enough to order them.
    """
    layers, groups = group_by_layer(losses.nodes(timer.base)), dict[str, list[str]]()
    for name in layers:
        groups.setdefault(".".join("*" if word.isdecimal() else word for word in name.split(".")), []).append(name)
    module, shape = losses.module, losses.choosing[0][0].shape[1:]
    images = torch.cat([one for one, _ in losses.choosing if one.shape[1:] == shape])[:_ALONE].to(losses.device)
    alone = layer_losses(
        module, images, blocks_or_units(module), lambda some, count: track(some, "measuring layers", count, "layers")
    )
    found: list[Layer] = []
    base_ms, float_ms = timer.reference
    for names in track(list(groups.values()), f"timing on {timer.backend.name}", len(groups), "groups of layers"):
        group = [Layer(name, layers[name], alone[name].sqnr_db, 0.0) for name in names]
        saved = base_ms * (timer.ratio(without(timer.base, group), True) - 1) if len(groups) > 1 else float_ms - base_ms
        found += [layer._replace(saved_ms=saved / len(group)) for layer in group]
    return found
