"""What a search measures: losses in fake-quant on pictures, milliseconds of exported files on an engine; its result."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import artifact_engine, targets
from swin_quant.base.distributed import World, world_on
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import atomic_write_bytes, finite
from swin_quant.base.progress import log, track
from swin_quant.cards.costs import FloatLayerRecord, TriedPolicies, TriedRecord
from swin_quant.cards.lineage import find_original
from swin_quant.model import Model
from swin_quant.models.registry import blocks_or_units
from swin_quant.quant.distance import Loss, distance, make_loss
from swin_quant.quant.policy import (
    Policy,
    Rule,
    apply_policy,
    dequantize,
    described,
    enabled_nodes,
    load_policy,
    quantize,
)
from swin_quant.quant.sensitivity import group_by_layer, layer_losses
from swin_quant.report.nodes import search_data, search_table
from swin_quant.report.printed import Printed
from swin_quant.report.table import NARROW, WIDE, ReportTable, print_text, screen_width
from swin_quant.report.verdict import DeployVerdict, search_verdict
from swin_quant.score.baseline import load_original
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.budget import Budget
from swin_quant.verbs.export_target import ExportTarget, float_type_options
from swin_quant.verbs.sensitivity import Sample
from swin_quant.verbs.timing import timed_in_turns

_ALONE = 16  # pictures on which each layer is measured alone
_CHOOSING = 4  # one picture in so many chooses, the others confirm
_LEARNED_FROM = ("train", "")  # splits of training pictures; "": unknown, and perhaps one
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

    def alone(self, base: Policy) -> dict[str, Loss]:
        """The loss with only one layer quantized, by layer."""
        apply_policy(self.module, base)
        shape = self.choosing[0][0].shape[1:]
        images = torch.cat([one for one, _ in self.choosing if one.shape[1:] == shape])[:_ALONE].to(self.device)
        return layer_losses(
            self.module,
            images,
            blocks_or_units(self.module),
            lambda numbers, total: track(numbers, "what each layer costs", total, "layers"),
        )

    def _loss(self, policy: Policy, pairs: Sequence[tuple[Tensor, Tensor]]) -> Loss:
        """The drop is that to expect on pictures that the network does not know."""
        if self.nodes(policy):
            quantize(self.module)
        with torch.inference_mode():
            found = make_loss([distance(self.module(images.to(self.device)), logits) for images, logits in pairs])
        dequantize(self.module)
        times = _UNSEEN if self.split in _LEARNED_FROM else 1.0
        return replace(found, drop=times * found.drop, drop_error=times * found.drop_error)

    def _original(self, model: Model) -> torch.nn.Module:
        """The float network that the user had, if passes changed the weights; a QAT model is its own original."""
        if (given := model.original) is not None:
            return deepcopy(given).to(self.device).eval()
        if model.card.is_qat or not model.card.has_own_weights:
            return self.module
        if file := find_original(model.card, [model.checkpoint.resolve().parent]):
            return load_original(model.config, file, World(device=self.device))[0].eval()
        log.warning(
            "%s: losses are against its own weights, because its float file is neither where its run card says nor "
            "beside it",
            model.checkpoint,
        )
        return self.module


class Timer:
    """Times a model's files on an engine, each in turns with the file of the `base` policy."""

    def __init__(
        self, model: Model, engine: str, policy: str | Policy | None, batch: int, options: EngineOptions
    ) -> None:
        self.backend, self.model, self.batch = timed_backend(engine, options.device), model, batch
        if batch < 1:
            raise UsageError(f"‹batch› {batch}: must be at least 1")
        base = load_policy(policy or self.backend.exporting.policies_for(model.card.config)[0])
        self.base = replace(base, name=described(base))  # no other candidate has its name
        self.options = replace(options, device=self.backend.home or options.device)
        self.export_options = float_type_options(self.backend, self.backend, options.float_type)

    def export(self, policy: Policy | None, folder: Path) -> Path:
        """Write the model under a policy (None: in float) to `folder`; returns the artifact's file."""
        target = ExportTarget.parse(self.backend.name, "int8" if policy else "float", self.export_options)
        card, file, module = self.model.card, self.model.checkpoint, deepcopy(self.model.network).cpu()
        used = target.policy(card, file, policy)
        apply_policy(module, used)
        return target.write(module, card, file, folder, used).file

    def rounds(self, policy: Policy | None) -> list[tuple[float, ...]]:
        """The milliseconds of a batch in each round: of the base policy, and of `policy` (None: in float)."""
        return timed_in_turns([self._base, self._engine(policy)], self.batch, self.model.network.input_shape)

    def ratio(self, policy: Policy, beyond_chance: bool = False) -> float:
        """The time beside the base policy's, by the best rounds: other work makes calls slower, never faster.

        `beyond_chance`: 1 where rounds disagree which of both is faster.
        """
        rounds = self.rounds(policy)
        base, other = map(min, zip(*rounds, strict=True))
        signs = {mine > theirs for theirs, mine in [(base, other), *rounds]}
        return 1.0 if beyond_chance and len(signs) > 1 else other / base

    @cached_property
    def reference(self) -> tuple[float, float]:
        """Milliseconds of a batch under the base policy, and in float."""
        base, other = map(min, zip(*self.rounds(None), strict=True))
        return base, other

    @cached_property
    def _base(self) -> Engine:
        return self._engine(self.base)

    def _engine(self, policy: Policy | None) -> Engine:
        with TemporaryDirectory(prefix="swin-quant-search-") as folder:
            file = self.export(policy, Path(folder))
            try:
                return artifact_engine(str(file), self.backend, self.options)
            except RuntimeError as error:
                raise SwinQuantError(f"{self.backend.name} could not be timed: {one_line(str(error))}") from error


def measure_layers(timer: Timer, losses: Losses) -> list[Layer]:
    """Measure the error of each layer alone, and the time of each group of layers once, left float.

    A group is all layers whose names differ in numbers alone, as those of a network's blocks do. Its layers share what
    it saves equally: the times of layers add up well enough to order them.
    """
    layers, groups = group_by_layer(losses.nodes(timer.base)), dict[str, list[str]]()
    for name in layers:
        groups.setdefault(".".join("*" if word.isdecimal() else word for word in name.split(".")), []).append(name)
    alone, found = losses.alone(timer.base), list[Layer]()
    base_ms, float_ms = timer.reference
    for names in track(list(groups.values()), f"timing on {timer.backend.name}", len(groups), "groups of layers"):
        group = [Layer(name, layers[name], alone[name].sqnr_db, 0.0) for name in names]
        saved = base_ms * (timer.ratio(without(timer.base, group), True) - 1) if len(groups) > 1 else float_ms - base_ms
        found += [layer._replace(saved_ms=saved / len(group)) for layer in group]
    return found


@dataclass(frozen=True)
class Search(Printed):
    """The result of a search; false where the budget cannot be met. Printed, it is the table of `swin-quant search`.

    `policy`: the fastest within the budget, or the best there was; its `file` says why each of its layers stays float.
    `record`: all measurements, as the run card holds them. `verdict`: what to deploy, and the command that exports it.
    """

    policy: Policy
    file: Path
    record: TriedPolicies
    verdict: DeployVerdict

    @property
    def unmet(self) -> str:
        """Say that no policy keeps the limits, not even this one."""
        return f"the budget cannot be met ({self.record['budget']}): the best that was found is {self.file}"

    @property
    def nodes(self) -> int:
        """The number of nodes that the policy quantizes."""
        return next(one["nodes"] for one in self.record["tried"] if one["found"])

    def __bool__(self) -> bool:
        return self.record["met"]

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.verdict._repr_html_()

    def show(self, otherwise: int = WIDE) -> None:
        """Print the table and the verdict."""
        super().show(otherwise)
        print_text("\n" + self.verdict.text(screen_width(NARROW)))

    def to_json(self) -> dict[str, Any]:
        """The table as data, with the verdict."""
        return search_data(self.record, self.file) | {"verdicts": [self.verdict.to_dict()]}

    def check(self) -> None:
        """SwinQuantError where the budget cannot be met."""
        if not self:
            raise SwinQuantError(self.unmet)

    def tables(self) -> list[ReportTable[TriedRecord]]:
        return [search_table(self.record, self.file)]


def write_found(
    timer: Timer, losses: Losses, left_float: Sequence[Layer], loss: Loss, budget: Budget, folder: str | Path
) -> Search:
    """Time the policy that was found and write it, with the reason of each layer in a comment."""
    base, found, engine = timer.base, without(timer.base, left_float), timer.backend.name
    base_ms, float_ms = timer.reference
    ms = float_ms if not losses.nodes(found) else base_ms * timer.ratio(found) if left_float else base_ms
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
    if losses.nodes(found):
        record["policy_sha256"] = policy.sha256
    float_type = timer.options.float_type or timer.backend.float_form
    return Search(policy, file, record, search_verdict(record, file, str(timer.model.checkpoint), float_type))


def timed_backend(engine: str, device: str) -> Backend:
    """The backend of an engine that is timed on a device. UsageError for another, and one that is not installed."""
    known = {name: one for name, one in targets().items() if one.runs_its_export and one.is_fast_on(device)}
    if engine not in known:
        raise UsageError(f"‹engine› {engine}: latency is measured on {', '.join(known)}")
    if not known[engine].is_installed:
        raise UsageError(f"‹engine› {engine}: is not installed: {known[engine].remedy}")
    return known[engine]


def policy_file(folder: str | Path, name: str, engine: str) -> Path:
    """The file of the policy that is found for a model of that name."""
    return Path(folder) / f"{name}_auto_{engine}.yaml"
