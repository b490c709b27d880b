"""What policies cost, measured once: losses by fake-quant on pictures, milliseconds on an engine; kept in a journal."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from swin_quant.base.distributed import world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.journal import Journal
from swin_quant.base.progress import log, track
from swin_quant.base.schema import Must, within
from swin_quant.cards.costs import LossRecord
from swin_quant.cards.lineage import original_of
from swin_quant.checkpoint.range_bits import check_bits
from swin_quant.config.outputs import need_logits
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import load_for_scoring
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import blocks_or_units
from swin_quant.quant.distance import Loss, Totals, distance
from swin_quant.quant.listing import list_nodes
from swin_quant.quant.policy import Policy, Rule, apply_policy, dequantize, enabled_nodes, quantize
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.search import Unit
from swin_quant.quant.sensitivity import LAYER, sensitivity
from swin_quant.score.baseline import load_original
from swin_quant.tasks.measured_on import of_config
from swin_quant.tasks.measuring import Measuring
from swin_quant.tasks.policy_timing import beyond_chance, extremes, timed
from swin_quant.verbs.export import export_checkpoint

_LEARNED_FROM = ("train", "")  # where nobody said of which split pictures are, they may be
# Times the drop on what a network was trained on, since it is less sure of others: of the hard models of
# docs/results/hard.md under eight policies, 1.0 to 2.0 times as many val as training pictures changed class.
_UNSEEN = 2.0


_Ms = Annotated[float, within(above=0)]
Shown = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]


class LayerNoise(TypedDict):
    """The nodes of a layer, and the power of the noise that they bring alone, over that of the logits."""

    nodes: list[str]
    error: Annotated[float, within(least=0)]


class Measured:
    """What is measured, once: losses by fake-quant, milliseconds on the engine; all of it in the journal."""

    def __init__(self, asked: Measuring) -> None:
        self.asked = asked
        need_logits(asked.cfg, "search")
        self.world = world_on(asked.options.device)
        subject = load_for_scoring(asked.cfg, asked.checkpoint, [asked.start], self.world)
        self.model: Classifier = subject.model.eval()
        self.card, self.card_file = subject.card, subject.card_file
        preprocess = Preprocess.from_dict(subject.card.preprocess)
        self.shown = asked.pictures or of_config(asked.cfg, asked.sampling, preprocess)
        self.batches = self.shown.batches
        self.pictures = sum(map(len, self.batches))
        original = self._original()
        self.expected = self._answers(original or self.model, self.batches)
        beside = {"original": self.card.original_sha256} if original else {}
        self.journal = Journal(asked.journal, asked.subject | beside)
        if self.journal.found:
            log.info("%s: %d results of an earlier search", self.journal.path, self.journal.found)
        if not asked.is_timed:
            self._export(asked.start)  # what cannot be exported at all is said before anything is measured

    @cached_property
    def units(self) -> list[Unit]:
        """The layers of the base policy, with what they cost; none where no latency is measured."""
        apply_policy(self.model, self.asked.start)
        if not enabled_nodes(self.model):
            raise UsageError(f"policy {self.asked.start.name} quantizes nothing: there is nothing to leave float")
        if not self.asked.is_timed:
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
        """The base with these layers left float."""
        if not off:
            return self.asked.start
        nodes = [node for name, layer in self.layers.items() if name in off for node in layer["nodes"]]
        mine = f"{self.asked.start.name} less {len(off)} layers"
        others = replace(self.asked.start.and_then(Rule(disable=tuple(nodes))), name=mine)
        return replace(others, name=f"{mine} {others.sha256[:6]}")

    def takes(self, policy: Policy) -> bool:
        """Whether the checkpoint has the ranges that a policy needs, and one that is not timed can be exported."""
        apply_policy(self.model, policy)
        try:
            quantize(self.model)
        except SwinQuantError:  # as lower ends, which other tools do not write
            return False
        finally:
            dequantize(self.model)
        try:
            check_bits(self.model, self.card, [policy], self.asked.checkpoint)
            if not self.asked.is_timed:
                self._export(policy)
        except UsageError:
            return False
        return True

    def loss(self, policy: Policy) -> Loss:
        """Of the model in fake-quant under a policy; the drop is that to expect on pictures that it does not know."""
        return self._remembered("losses", policy, lambda: (self.batches, self.expected))

    def loss_of_others(self, policy: Policy) -> Loss | None:
        """The same on others, by which nothing was chosen, as many as there are of these; None where there are none."""
        if self.shown.others is None:
            return None
        return self._remembered("losses of others", policy, lambda: self._others)

    @property
    def has_others(self) -> bool:
        return self.shown.others is not None

    @cached_property
    def _others(self) -> tuple[list[Tensor], list[Tensor]]:
        """Their batches, and the logits of the float model."""
        assert self.shown.others is not None
        batches = self.shown.others()
        dequantize(self.model)
        return batches, self._answers(self._original() or self.model, batches)

    def _answers(self, model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode():
            return [model(self._there(images)) for images in batches]

    def _remembered(self, what: str, policy: Policy, shown: Shown) -> Loss:
        key = f"{what} {policy.sha256}"
        found: LossRecord = self.journal.remember(key, LossRecord, lambda: self._loss(policy, *shown()))
        sqnr = math.inf if found["sqnr_db"] is None else found["sqnr_db"]
        times = _UNSEEN if self.asked.sampling.split in _LEARNED_FROM else 1.0
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
        """By the policy's name: milliseconds, or nodes left float where those are not measured."""
        if self.asked.is_timed:
            return self.milliseconds(policies)
        return {policy.name: self.float_cost - self.nodes_on(policy) for policy in policies}

    @property
    def float_cost(self) -> float:
        """That of no node quantized."""
        return self.float_ms if self.asked.is_timed else len(named_nodes(self.model))

    def milliseconds(self, policies: Sequence[Policy]) -> dict[str, float]:
        """Of a batch on the engine, by the policy's name; timed together, in turns."""
        some = {policy.sha256: policy for policy in policies if self.nodes_on(policy)}
        missing = {sha256: policy for sha256, policy in some.items() if self._known_ms(sha256) is None}
        for ratios in timed(self.asked, missing):
            self.journal.keep({f"ms {sha256}": ratio * self.base_ms for sha256, ratio in ratios.items()}, _Ms)
        return {p.name: self._known_ms(p.sha256) or 0.0 if p.sha256 in some else self.float_ms for p in policies}

    @property
    def base_ms(self) -> float:
        return self._reference[0]

    @property
    def float_ms(self) -> float:
        return self._reference[1]

    @cached_property
    def _reference(self) -> tuple[float, float]:
        """Milliseconds with all on, and with all float."""
        measure = partial(extremes, self.asked)
        found: tuple[float, float] = self.journal.remember("ms of all and none", tuple[_Ms, _Ms], measure)
        return found

    def _export(self, policy: Policy) -> None:
        with TemporaryDirectory(prefix="swin-quant-search-") as workspace:
            export_checkpoint(self.asked.checkpoint, self.asked.engine, workspace, self.asked.cfg, policy)

    def _known_ms(self, sha256: str) -> float | None:
        known: float | None = self.journal.known(f"ms {sha256}", _Ms)
        return known

    def _original(self) -> Classifier | None:
        """What the user had, where passes changed what the weights compute; a model that QAT trained is its own."""
        asked, card = self.asked, self.card
        if card.is_qat or not card.has_own_weights:
            return None
        file = original_of(card, [Path(asked.checkpoint).resolve().parent])
        if file is None:
            log.warning("%s: losses are against its own weights: the float file that it was made of is not found, "
                        "where its run card says or beside it", asked.checkpoint)  # fmt: skip
            return None
        return load_original(asked.cfg, file, self.world)[0].eval()

    def _there(self, images: Tensor) -> Tensor:
        return images.to(self.world.device)

    def _alone(self) -> dict[str, LayerNoise]:
        apply_policy(self.model, self.asked.start)
        blocks = blocks_or_units(self.model)
        some = [self._there(images) for images in self.batches[: max(1, 64 // len(self.batches[0]))]]
        tell = partial(_bar, "what each layer costs")
        found = sensitivity(self.model, list(enumerate(some)), blocks, tell=tell, kinds=(LAYER,))
        return {
            group.name: LayerNoise(nodes=list(group.nodes), error=10 ** (-group.alone.sqnr_db / 10))
            for group in found.groups
        }

    def _loss(self, policy: Policy, batches: Sequence[Tensor], answers: Sequence[Tensor]) -> dict[str, float]:
        apply_policy(self.model, policy)
        totals = Totals()
        if enabled_nodes(self.model):
            quantize(self.model)
        with torch.inference_mode():
            for images, expected in zip(batches, answers, strict=True):
                totals.add(distance(self.model(self._there(images)), expected))
        dequantize(self.model)
        return asdict(totals.loss())

    def _kinds(self) -> dict[str, list[str]]:
        """Layers of equal name and equal shapes, which cost the same on any engine."""
        apply_policy(self.model, self.asked.start)
        side = self.asked.cfg.DATA.IMG_SIZE
        shapes = {row.name: row.shape for row in list_nodes(self.model, (1, self.batches[0].shape[1], side, side))}
        kinds: dict[str, list[str]] = {}
        for layer, noise in self.layers.items():
            kind = f"{layer.rpartition('.')[2]} {[shapes[node] for node in noise['nodes']]}"
            kinds.setdefault(kind, []).append(layer)
        return kinds

    def _saved(self, kinds: Mapping[str, list[str]]) -> dict[str, float]:
        """Kind -> milliseconds that the engine is faster with all of its layers quantized."""
        saved = Annotated[float, within(above=-self.base_ms)]  # what it would take is more than nothing
        known = {kind: self.journal.known(f"kind {kind}", saved) for kind in kinds}
        left = {kind: self.policy(frozenset(kinds[kind])) for kind, ms in known.items() if ms is None}
        some = {kind: policy for kind, policy in left.items() if self.nodes_on(policy)}

        def keep(found: Mapping[str, float]) -> None:
            known.update(found)
            self.journal.keep({f"kind {kind}": ms for kind, ms in found.items()}, saved)

        for ratios in timed(self.asked, some, beyond_chance):
            keep({kind: (ratio - 1) * self.base_ms for kind, ratio in ratios.items()})
        keep({kind: self.float_ms - self.base_ms for kind in left.keys() - some.keys()})  # the only kind there is
        return {kind: ms for kind, ms in known.items() if ms is not None}


def _bar(what: str, numbers: Any, total: int) -> Any:
    return track(numbers, what, total)
