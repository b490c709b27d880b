"""What `search` measures and finds: the loss and time of each layer, the budget, and the policy as YAML."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from swin_quant.base.distributed import World, world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, finite
from swin_quant.base.progress import log, track
from swin_quant.cards.lineage import find_original
from swin_quant.cards.records import FloatLayerRecord, TriedPolicies, TriedRecord
from swin_quant.model import Model
from swin_quant.models.registry import blocks_or_units
from swin_quant.quant.distance import Loss, distance, make_loss
from swin_quant.quant.policy import Policy, Rule, apply_policy, dequantize, enabled_nodes, load_policy, quantize
from swin_quant.quant.sensitivity import group_by_layer, layer_losses
from swin_quant.report.nodes import Search
from swin_quant.report.verdict import search_verdict
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
    alone = layer_losses(module, images, blocks_or_units(module))
    found: list[Layer] = []
    base_ms, float_ms = timer.reference
    for names in track(list(groups.values()), f"timing on {timer.backend.name}", len(groups), "groups of layers"):
        group = [Layer(name, layers[name], alone[name].sqnr_db, 0.0) for name in names]
        saved = base_ms * (timer.ratio(without(timer.base, group), True) - 1) if len(groups) > 1 else float_ms - base_ms
        found += [layer._replace(saved_ms=saved / len(group)) for layer in group]
    return found


_FEW = 100  # pictures times points: a sample of fewer may show no difference and still hide the drop
_LIMITS = {  # the words for each, and the largest number that says something
    "max_drop": ("expected drop of top-1 at most {:g} points", 100.0),
    "min_agreement": ("agreement at least {:g} %", 100.0),
    "min_sqnr": ("SQNR at least {:g} dB", math.inf),
    "max_ms": ("at most {:g} ms", math.inf),
}


@dataclass(frozen=True)
class Budget:
    """Limits of a policy's loss and latency; None: no limit. The drop counts with two standard errors.

    Args:
        max_drop: largest drop of top-1 accuracy, in points (default 0.1)
        min_agreement: smallest share of pictures with the same top-1 as float, in percent
        min_sqnr: smallest SQNR of the logits, in dB
        max_ms: largest latency of a batch on the engine, in milliseconds

    Raises:
        UsageError: A limit that no policy keeps, or that every policy keeps.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    min_sqnr: float | None = None
    max_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _LIMITS[name][1]
            if value is not None and not (0 <= value <= most and value < math.inf):
                raise UsageError(f"‹{name}› {value:g}: must be a number from 0 " + ("up", "to 100")[most < math.inf])

    @property
    def or_default(self) -> "Budget":
        """These limits; a drop of 0.1 points where none of the loss is given."""
        return self if replace(self, max_ms=None) != Budget() else replace(self, max_drop=0.1)

    def allows(self, loss: Loss) -> bool:
        return (
            (self.max_drop is None or loss.most_drop <= self.max_drop)
            and (self.min_agreement is None or loss.agreement >= self.min_agreement)
            and (self.min_sqnr is None or loss.sqnr_db >= self.min_sqnr)
        )

    def tell_if_few(self, pictures: int) -> None:
        """Warn where so many pictures may show no difference and still hide the drop."""
        if (drop := self.max_drop) and pictures * drop < _FEW:
            told = "%d pictures hardly tell a drop of %g points: give %d or more (‹pictures›)"
            log.warning(told, pictures, drop, math.ceil(_FEW / max(drop, 1e-6)))

    def __str__(self) -> str:
        return ", ".join(_LIMITS[name][0].format(value) for name, value in asdict(self).items() if value is not None)


def policy_file(folder: str | Path, name: str, engine: str) -> Path:
    """The file of the policy that is found for a model of that name."""
    return Path(folder) / f"{name}_auto_{engine}.yaml"


def write_found(
    timer: Timer, losses: Losses, left_float: Sequence[Layer], loss: Loss, budget: Budget, folder: str | Path
) -> Search:
    """Time the policy that was found and write it, with the reason of each layer in a comment."""
    base, found, engine = timer.base, without(timer.base, left_float), timer.backend.name
    base_ms, float_ms = timer.reference
    count = len(losses.nodes(found))
    ms = float_ms if not count else base_ms * timer.ratio(found) if left_float else base_ms
    measured = {base: (losses.confirm(base), base_ms), found: (loss, ms)}
    rows = [(one.name, len(losses.nodes(one)), *figures) for one, figures in measured.items()]
    rows.append(("float", 0, Loss(math.inf, 0.0, 100.0, 0.0), float_ms))
    file = policy_file(folder, timer.model.name, engine)
    description = (
        f"Found for {engine}, batch {timer.batch}: {budget}. It is {found.name}. Confirmed on {losses.pictures} "
        f"pictures{losses.split and ' of '}{losses.split}: {loss.figures}; {ms:.3f} ms."
    )
    text = yaml.safe_dump(replace(found, name=file.stem, description=description).to_dict(), sort_keys=False, width=110)
    for layer in left_float:
        text += f"# {layer.name} is float: {layer.sqnr_db:.1f} dB alone; int8 saves {layer.saved_ms:.4f} ms there\n"
    atomic_write_bytes(file, text.encode())
    log.info("policy: %s", file)
    policy = load_policy(str(file))
    record: TriedPolicies = {
        "engine": engine,
        "batch": timer.batch,
        "budget": str(budget),
        "met": budget.allows(loss) and (budget.max_ms is None or ms <= budget.max_ms),
        "pictures": losses.pictures,
        "tried": [
            TriedRecord(
                policy=name,
                nodes=nodes,
                loss=finite(one.record()),
                ms=time,
                found=name == found.name,
                front=not any(other.kl < one.kl and faster <= time for *_, other, faster in rows),
            )
            for name, nodes, one, time in sorted(rows, key=lambda row: row[-1])
        ],
        "left_float": [FloatLayerRecord(layer=one.name, sqnr_db=finite(one.sqnr_db), saved_ms=one.saved_ms)
                       for one in left_float],
        "cost_ms": ms - base_ms,
    }  # fmt: skip
    if count:
        record["policy_sha256"] = policy.sha256
    float_type = timer.options.float_type or timer.backend.float_form
    return Search(policy, file, record, search_verdict(record, file, str(timer.model.checkpoint), float_type))


def refuse_useless(found: Search) -> None:
    """SwinQuantError where a search kept no budget, or left every layer float."""
    if not found:
        raise SwinQuantError(f"{found.unmet} ({found.verdict.summary})")
    if not next(one["nodes"] for one in found.record["tried"] if one["found"]):
        raise SwinQuantError(
            f"within the budget ({found.record['budget']}) every layer stays float: loosen it, or deploy the float "
            f"model: `{found.verdict.next}`"
        )
