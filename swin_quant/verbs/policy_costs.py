"""Costs of policies, measured once: losses by fake-quant on pictures, milliseconds on an engine; kept in a journal."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, TypedDict

import torch
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.registry import artifact_engine
from swin_quant.base.cpu import usable_cores
from swin_quant.base.distributed import world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import Journal, ensure_writable_dir, sha256_of
from swin_quant.base.progress import log, track
from swin_quant.base.schema import Must, within
from swin_quant.cards.costs import LossRecord
from swin_quant.cards.lineage import original_of
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.exported import on_its_device
from swin_quant.model import Model
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import blocks_or_units
from swin_quant.quant.distance import Loss, distance, loss_of
from swin_quant.quant.policy import Policy, Rule, apply_policy, dequantize, enabled_nodes, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.search import Unit
from swin_quant.quant.sensitivity import LAYER, sensitivity
from swin_quant.report.nodes import list_nodes
from swin_quant.score.baseline import load_original
from swin_quant.score.candidate import BenchCandidate, Timing, interleave
from swin_quant.verbs.export_target import ExportTarget
from swin_quant.verbs.search_settings import SearchSettings

WORKSPACE = "swin-quant-search-"  # first part of the name of a folder for exported files
_AT_ONCE = 6  # engines in memory while they are timed in turns
_ALL_ON, _FLOAT = "all", "float"
_LEARNED_FROM = ("train", "")  # splits of training pictures; "": unknown, and perhaps one
# The factor from the drop on training pictures to that on unseen ones, of which a network is less sure: on the hard
# models of tests/outliers.py under eight policies, 1.0 to 2.0 times as many val as training pictures changed class.
_UNSEEN = 2.0
_ALONE = 64  # pictures on which each layer is measured alone


def _ms(timing: Timing) -> float:
    """Milliseconds of the best round: other work on the machine makes calls slower, never faster."""
    if not timing.rounds:
        raise SwinQuantError(f"{timing.candidate}: was not timed")
    return min(map(median, timing.rounds))


def _ratio(timing: Timing, base: Timing) -> float:
    return _ms(timing) / _ms(base)


def beyond_chance(timing: Timing, base: Timing) -> float:
    """The ratio of the best rounds; 1 where rounds disagree which of both is the faster.

    On a busy machine the differences of layers drown in noise, which would otherwise choose among them.
    """
    best = _ratio(timing, base)
    each = [median(theirs) / median(ours) for theirs, ours in zip(timing.rounds, base.rounds, strict=True)]
    return best if min(best, *each) > 1 or max(best, *each) < 1 else 1.0


@dataclass(frozen=True)
class PolicyTimer:
    """Exports a loaded model under policies, and times the files."""

    settings: SearchSettings
    model: Model
    _kept: TemporaryDirectory[str] = field(default_factory=partial(TemporaryDirectory, prefix=WORKSPACE))

    def export(self, policy: Policy | None, folder: Path) -> Artifact:
        """The model under a policy as an artifact in `folder`; None: the float model."""
        card, file, precision = self.model.card, self.model.checkpoint, "int8" if policy else "float"
        target = ExportTarget.of(self.settings.engine, precision, self.settings.exporter_options)
        used = target.policy(card, file, policy)
        module = deepcopy(self.model.network).cpu()
        apply_policy(module, used)
        return target.write(module, card, file, folder, used)

    @cached_property
    def _base(self) -> Artifact:
        """The file of the base policy, which every lot is timed beside."""
        return self.export(self.settings.start, Path(self._kept.name))

    def extremes(self) -> tuple[float, float]:
        """Milliseconds with all nodes of the base policy on, and with all float."""
        timings = self._interleaved({_FLOAT: None})
        return _ms(timings[_ALL_ON]), _ms(timings[_FLOAT])

    def ratios(
        self, policies: Mapping[str, Policy], ratio: Callable[[Timing, Timing], float] = _ratio
    ) -> Iterator[dict[str, float]]:
        """Name -> milliseconds relative to the base policy's, by the best rounds or by `ratio`.

        A few policies at a time. The caller should keep each lot at once: it took minutes to export, load and time.
        """
        names = list(policies)
        starts = range(0, len(names), _AT_ONCE - 1)
        for first in track(starts, f"timing on {self.settings.engine}", len(starts), "groups of policies"):
            some = {name: policies[name] for name in names[first : first + _AT_ONCE - 1]}
            timings = self._interleaved(some)
            yield {name: ratio(timings[name], timings[_ALL_ON]) for name in some}

    def _interleaved(self, policies: Mapping[str, Policy | None]) -> dict[str, Timing]:
        """The base policy and these, in turns."""
        settings = self.settings
        how = on_its_device(settings.engine, settings.options)
        with TemporaryDirectory(prefix=WORKSPACE) as workspace:
            files = {_ALL_ON: self._base.file}
            for number, (name, policy) in enumerate(policies.items()):
                files[name] = self.export(policy, Path(workspace) / str(number)).file
            candidates = [
                BenchCandidate(name, partial(artifact_engine, str(file), settings.backend, how), file)
                for name, file in files.items()
            ]
            threads = settings.options.threads or usable_cores()
            shape = self.model.network.input_shape
            timings = interleave(candidates, [settings.batch], settings.rounds, settings.seconds, shape, threads)
        for timing in timings:
            if timing.failure:
                raise SwinQuantError(f"{settings.engine} could not be timed: {timing.failure}")
        return {timing.candidate: timing for timing in timings}


_Ms = Annotated[float, within(above=0)]
Shown = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]


class LayerNoise(TypedDict):
    """The nodes of a layer, and the power of their noise alone over that of the logits."""

    nodes: list[str]
    error: Annotated[float, within(least=0)]


class PolicyCosts:
    """Losses and milliseconds of policies of a model in a file; none is measured that the journal holds already.

    The module of `subject` is moved to the device, and stays under the last policy.
    """

    def __init__(self, settings: SearchSettings, subject: Model) -> None:
        ensure_writable_dir(settings.folder)
        self.settings, self.subject, self.file = settings, subject, subject.checkpoint
        self.world = world_on(settings.options.device)
        self.model: Classifier = subject.network.to(self.world.device).eval()
        self.timer = PolicyTimer(settings, subject)
        self.shown = settings.read(subject)
        self.batches = self.shown.batches
        self.pictures = sum(map(len, self.batches))
        settings.tell_if_few(self.pictures)
        original = self._original()
        self.expected = self._logits(original or self.model, self.batches)
        beside = {"original": subject.card.original_sha256 or "in memory"} if original else {}
        self.journal = Journal(settings.journal, settings.subject(sha256_of(self.file)) | beside)
        if self.journal.found:
            log.info("%s: %d results of an earlier search", self.journal.path, self.journal.found)
        if not settings.is_timed:
            self._try_export(settings.start)  # an export that is impossible is refused before anything is measured

    @cached_property
    def units(self) -> list[Unit]:
        """The layers of the base policy, with their costs; none where no latency is measured."""
        apply_policy(self.model, self.settings.start)
        if not enabled_nodes(self.model):
            raise UsageError(f"policy {self.settings.start.name} quantizes nothing: there is nothing to leave float")
        if not self.settings.is_timed:
            return []
        kinds = self._kinds()
        saved = self._saved(kinds)
        of = {layer: saved[kind] / len(layers) for kind, layers in kinds.items() for layer in layers}
        return [Unit(name, tuple(layer["nodes"]), layer["error"], of[name]) for name, layer in self.layers.items()]

    @cached_property
    def layers(self) -> dict[str, LayerNoise]:
        """The layers of the base policy by name."""
        nodes = named_nodes(self.model).keys()
        known = Must(lambda found: all(nodes >= {*one["nodes"]} for one in found.values()), "of this model's nodes")
        kind = Annotated[dict[str, LayerNoise], known]
        found: dict[str, LayerNoise] = self.journal.remember("layers alone", kind, self._alone)
        return found

    def policy(self, off: frozenset[str]) -> Policy:
        """The base policy with these layers left float."""
        start = self.settings.start
        if not off:
            return start
        nodes = [node for name, layer in self.layers.items() if name in off for node in layer["nodes"]]
        mine = f"{start.name} less {len(off)} layers"
        others = replace(start.and_then(Rule(disable=tuple(nodes))), name=mine)
        return replace(others, name=f"{mine} {others.sha256[:6]}")

    def takes(self, policy: Policy) -> bool:
        """Whether the checkpoint has the ranges that a policy needs; without timing, whether it can be exported too."""
        apply_policy(self.model, policy)
        try:
            quantize(self.model)
        except SwinQuantError:  # other tools do not write lower ends
            return False
        finally:
            dequantize(self.model)
        try:
            check_bits(self.model, self.subject.card, [policy], str(self.file))
            if not self.settings.is_timed:
                self._try_export(policy)
        except UsageError:
            return False
        return True

    def loss(self, policy: Policy) -> Loss:
        """The model's loss in fake-quant under a policy; its drop is that to expect on pictures it does not know."""
        return self._remembered("losses", policy, lambda: (self.batches, self.expected))

    def loss_of_others(self, policy: Policy) -> Loss | None:
        """The loss on as many other pictures, by which nothing was chosen; None where there are none."""
        return self._remembered("losses of others", policy, lambda: self._others) if self.has_others else None

    @property
    def has_others(self) -> bool:
        return self.shown.others is not None

    @cached_property
    def _others(self) -> tuple[list[Tensor], list[Tensor]]:
        """The batches of other pictures, and the float model's logits."""
        assert self.shown.others is not None
        batches = self.shown.others()
        dequantize(self.model)
        return batches, self._logits(self._original() or self.model, batches)

    def _logits(self, model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode():
            return [model(self._there(images)) for images in batches]

    def _remembered(self, name: str, policy: Policy, shown: Shown) -> Loss:
        key = f"{name} {policy.sha256}"
        found: LossRecord = self.journal.remember(key, LossRecord, lambda: self._loss(policy, *shown()))
        sqnr = math.inf if found["sqnr_db"] is None else found["sqnr_db"]
        times = _UNSEEN if self.settings.sampling.split in _LEARNED_FROM else 1.0
        drop, error = times * found["drop"], times * found["drop_error"]
        return Loss(sqnr, found["kl"], found["agreement"], drop, error)

    def nodes_on(self, policy: Policy) -> int:
        apply_policy(self.model, policy)
        return len(enabled_nodes(self.model))

    def nodes_off(self, policy: Policy) -> list[str]:
        """The names of the nodes that a policy leaves float."""
        apply_policy(self.model, policy)
        return [name for name, node in named_nodes(self.model).items() if not node.setting.enabled]

    def costs(self, policies: Sequence[Policy]) -> dict[str, float]:
        """Policy name -> milliseconds of a batch on the engine, timed together, in turns; the number of nodes left
        float where no latency is measured."""
        on = {policy.sha256: self.nodes_on(policy) for policy in policies}
        if not self.settings.is_timed:
            return {policy.name: self.float_cost - on[policy.sha256] for policy in policies}
        missing = {p.sha256: p for p in policies if on[p.sha256] and self._known_ms(p.sha256) is None}
        for ratios in self.timer.ratios(missing):
            self.journal.keep({f"ms {sha256}": ratio * self.base_ms for sha256, ratio in ratios.items()}, _Ms)
        return {p.name: self._known_ms(p.sha256) or 0.0 if on[p.sha256] else self.float_ms for p in policies}

    @property
    def float_cost(self) -> float:
        """The cost of the float model."""
        return self.float_ms if self.settings.is_timed else len(named_nodes(self.model))

    @property
    def base_ms(self) -> float:
        return self._reference[0]

    @property
    def float_ms(self) -> float:
        return self._reference[1]

    @cached_property
    def _reference(self) -> tuple[float, float]:
        """Milliseconds with all on, and with all float."""
        kind = tuple[_Ms, _Ms]
        found: tuple[float, float] = self.journal.remember("ms of all and none", kind, lambda: self.timer.extremes())
        return found

    def _try_export(self, policy: Policy) -> None:
        with TemporaryDirectory(prefix=WORKSPACE) as workspace:
            self.timer.export(policy, Path(workspace))

    def _known_ms(self, sha256: str) -> float | None:
        if sha256 == self.settings.start.sha256:
            return self.base_ms
        known: float | None = self.journal.known(f"ms {sha256}", _Ms)
        return known

    def _original(self) -> nn.Module | None:
        """The float model that the user had, if passes changed the weights; None for a QAT model, its own original."""
        card = self.subject.card
        if (given := self.subject.original) is not None:
            return given.to(self.world.device).eval()
        if card.is_qat or not card.has_own_weights:
            return None
        file = original_of(card, [self.file.resolve().parent])
        if file is None:
            log.warning(
                "%s: losses are against its own weights, because its float file is neither where its run card says nor "
                "beside it",
                self.file,
            )
            return None
        return load_original(self.settings.network.cfg, file, self.world)[0].eval()

    def _there(self, images: Tensor) -> Tensor:
        return images.to(self.world.device)

    def _alone(self) -> dict[str, LayerNoise]:
        apply_policy(self.model, self.settings.start)
        blocks = blocks_or_units(self.model)
        some = [self._there(images) for images in self.batches[: max(1, _ALONE // len(self.batches[0]))]]

        def bar(numbers: Iterable[int], total: int) -> Iterable[int]:
            return track(numbers, "what each layer costs", total, "layers")

        found = sensitivity(self.model, list(enumerate(some)), blocks, tell=bar, kinds=(LAYER,))
        return {
            group.name: LayerNoise(nodes=list(group.nodes), error=10 ** (-group.alone.sqnr_db / 10))
            for group in found.groups
        }

    def _loss(self, policy: Policy, batches: Sequence[Tensor], expected: Sequence[Tensor]) -> LossRecord:
        apply_policy(self.model, policy)
        if enabled_nodes(self.model):
            quantize(self.model)
        with torch.inference_mode():
            pairs = zip(batches, expected, strict=True)
            found = [distance(self.model(self._there(images)), logits) for images, logits in pairs]
        dequantize(self.model)
        return loss_of(found).record()

    def _kinds(self) -> dict[str, list[str]]:
        """Layers of equal name and equal shapes, which cost the same on any engine."""
        apply_policy(self.model, self.settings.start)
        shapes = {row.name: row.shape for row in list_nodes(self.model, (1, *self.model.input_shape))}
        kinds: dict[str, list[str]] = {}
        for layer, noise in self.layers.items():
            kind = f"{layer.rpartition('.')[2]} {[shapes[node] for node in noise['nodes']]}"
            kinds.setdefault(kind, []).append(layer)
        return kinds

    def _saved(self, kinds: Mapping[str, list[str]]) -> dict[str, float]:
        """Kind -> milliseconds that the engine is faster with all of its layers quantized."""
        saved = Annotated[float, within(above=-self.base_ms)]  # without its layers a batch still takes time
        known = {kind: self.journal.known(f"kind {kind}", saved) for kind in kinds}
        left = {kind: self.policy(frozenset(kinds[kind])) for kind, ms in known.items() if ms is None}
        some = {kind: policy for kind, policy in left.items() if self.nodes_on(policy)}

        def keep(found: Mapping[str, float]) -> None:
            known.update(found)
            self.journal.keep({f"kind {kind}": ms for kind, ms in found.items()}, saved)

        for ratios in self.timer.ratios(some, beyond_chance):
            keep({kind: (ratio - 1) * self.base_ms for kind, ratio in ratios.items()})
        keep({kind: self.float_ms - self.base_ms for kind in left.keys() - some.keys()})  # the base has this kind alone
        return {kind: ms for kind, ms in known.items() if ms is not None}
