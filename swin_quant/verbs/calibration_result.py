"""A calibration in memory: its pictures, its result with record and advice."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import clock, log, span, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import (
    AdviceRecord,
    CalibrationRecord,
    CheckRecord,
    CoverageRecord,
    SearchRecord,
)
from swin_quant.checkpoint.ranges import bits_record
from swin_quant.data.loader import DrawnBatches, Numbered
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import digest
from swin_quant.models.placement import coverage
from swin_quant.quant import CALIBRATED_ON
from swin_quant.quant.advice import Advice, Findings, advise, format_figures
from swin_quant.quant.calibration import Calibration, Method, observing, set_ranges
from swin_quant.quant.check import PICTURES, RUIN_DB, Shown, check_ranges
from swin_quant.quant.outlier_channels import OutlierChannels
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policy import Policy
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.watch import eval_mode
from swin_quant.verbs.calibration_passes import improve, outliers_left, passes_in_weights

BATCH = 8  # pictures at a time, at most


@dataclass(frozen=True)
class CalibrationBatches:
    """Numbered batches to calibrate on.

    Args:
        batches: The batches, each with its number.
        size: Pictures a number.
        record: The run card's part on the batches that were seen.
        class_names: Those of the pictures.
        count: How many batches, if that is known.
    """

    batches: Iterable[Numbered]
    size: int
    record: Callable[[Sequence[Numbered]], CalibrationRecord]
    class_names: Sequence[str] = ()
    count: int | None = None


def draw(pictures: PictureSet, transform: Transform, augment: bool = False) -> CalibrationBatches:
    """A seeded sample of training pictures, in the largest batches that divide it: ranges do not depend on batches.

    Args:
        pictures: A settled set.
        transform: Makes a tensor of a picture.
        augment: Whether the transform draws crops, for the record.
    """
    found = pictures.with_default_split("train")
    opened = found.open()
    count = min(len(opened), CALIBRATED_ON) if found.count is None else found.count
    largest = max(min(found.batch or BATCH, BATCH), 1)
    size = next(size for size in range(largest, 0, -1) if count % size == 0)
    seed, split = found.seed or 0, found.split or ""
    drawn = DrawnBatches(opened, transform, count, seed, size, found.max_unreadable or 0.0)

    def record(_: Sequence[Numbered]) -> CalibrationRecord:
        unreadable, names = drawn.unreadable(), drawn.names()
        if unreadable:
            log.warning("%d of %d pictures are unreadable: %s", len(unreadable), len(opened), listed(unreadable))
        sampled = {"batches": drawn.count, "batch_size": drawn.size, "seed": seed, "split": split}
        used = {"pictures_sha256": digest(names), "files": names, "unreadable": unreadable}
        return cast("CalibrationRecord", {**sampled, "augment": augment, "place": place_named(found), **used})

    return CalibrationBatches(
        track(drawn, "calibrating", len(drawn), "batches"), drawn.size, record, opened.class_names, len(drawn)
    )


def place_named(pictures: PictureSet) -> str:
    """The name of the place that pictures are from, as a run card has it: without folders of the machine."""
    return Path(pictures.path).name


def take(source: Iterable[Any], prepared: Prepared) -> CalibrationBatches:
    """Batches of any size, numbered by their first picture; a hash of their values stands for names."""

    def numbered() -> Iterator[Numbered]:
        total, first = len(source) if isinstance(source, Sized) else None, 0
        for batch in track(batches(source, labelled=False, prepared=prepared), "calibrating", total, "batches"):
            yield first, batch
            first += len(batch.images)

    def record(seen: Sequence[Numbered]) -> CalibrationRecord:
        values = hashlib.sha256()
        for _, batch in seen:
            values.update(batch.images.numpy(force=True).tobytes())
        size = max(len(batch.images) for _, batch in seen)
        sampled = {"batches": len(seen), "batch_size": size, "seed": 0, "split": "", "augment": False}
        known = {"pictures_sha256": values.hexdigest(), "files": [], "unreadable": []}
        return cast("CalibrationRecord", {**sampled, **known})

    return CalibrationBatches(numbered(), 1, record)


_CHECKED = 100  # forward passes of pictures behind the observation: outlier channels, and the check of ranges
_SHOWN = 5  # lines of advice on the screen, beside warnings


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration and its record; its numbered batches, and the first pictures, for the check.

    `outlier_channels`: the channels that still stand out behind the passes.
    """

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: Sequence[Shown]
    images: Sequence[tuple[int, Tensor]] = ()
    outlier_channels: Sequence[OutlierChannels] = ()

    def improved(
        self,
        model: nn.Module,
        plan: PassPlan,
        before: RunCard | None = None,
        scratch: Scratch = Scratch(),
    ) -> "CalibrationResult":
        """The result behind the passes of `plan`, recorded with the passes that the weights have seen `before`."""
        earlier, record = passes_in_weights(before), self.record
        if len({tuple(batch.shape[1:]) for _, batch in self.images if len(batch)}) > 1:
            if plan.steps:
                raise UsageError(
                    "‹passes›: needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE "
                    "square"
                )
            return replace(self, record={**record, "passes": earlier}) if earlier else self
        with eval_mode(model):
            calibration, done = improve(model, self.calibration, self.images, self.method, plan, scratch)
            if passes := [*earlier, *done]:
                again = search_record(self.method, model, calibration)
                record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
            outlier_channels = outliers_left(model, self.images, passes)
        return replace(self, calibration=calibration, record=record, outlier_channels=outlier_channels)

    def checked(self, model: nn.Module, policy: Policy) -> CalibrationRecord:
        """The record, with the cost of the ranges under `policy`, which is applied, and advice, which is also
        logged."""
        check = check_ranges(model, self.calibration, self.method, self.some)
        passes = split_passes(self.record)
        nodes = named_nodes(model)
        found = Findings(nodes, self.calibration, self.method, policy.name, check, *passes, self.outlier_channels)
        record: CalibrationRecord = {**self.record, "advice": tell_advice(advise(found))}
        if products := getattr(model, "products", ()):
            every = model.named_modules(remove_duplicate=False)  # a shared layer is called by any of its names
            enabled = [name for name, one in every if isinstance(one, Quantizer) and one.setting.enabled]
            covered = coverage(products, enabled)
            record["coverage"] = cast(CoverageRecord, asdict(covered))
            log.info("%s: %s", policy.name, covered)
        if check is None:
            return record
        if not check.better and check.sqnr_db >= RUIN_DB:
            log.info("%s: %s", policy.name, format_figures(check))
        cost = CheckRecord(
            policy=policy.name,
            pictures=check.pictures,
            agreement=check.agreement,
            sqnr_db=finite(check.sqnr_db),
            others=finite(check.others),
            at_fault=list(check.at_fault),
        )
        return {**record, "check": cost}


def calibrated_on(model: nn.Module, shown: CalibrationBatches, method: Method) -> CalibrationResult:
    """Calibrate `model`: show it each batch, then search the ranges."""
    device = next(model.parameters()).device
    seen: list[Numbered] = []
    some: list[Shown] = []
    start = clock()
    with observing(model, method) as observation:
        for number, batch in shown.batches:
            images = batch.images.to(device)
            logits = observation.show(images)
            seen.append((number, replace(batch, images=images)))
            if len(seen) == 2 and shown.count:  # the first one tries how batches can run
                batches = shown.count + _CHECKED / shown.size
                log.info(
                    "calibration takes about %s, without passes that are asked for",
                    span(batches * (clock() - start) / 2),
                )
            if (wanted := PICTURES - number * shown.size) > 0:
                some.append((images[:wanted], logits[:wanted]))
    calibration = observation.calibration()
    set_ranges(model, calibration, method)
    record: CalibrationRecord = {
        **shown.record(seen),
        "exact": method.exact,
        "pictures": calibration.pictures,
        "beyond_half": calibration.beyond_half,
        "check": None,
        "statistics": None,
        "advice": [],
        **search_record(method, model, calibration),
    }
    return CalibrationResult(calibration, record, method, some, [(number, batch.images) for number, batch in seen])


def search_record(method: Method, model: nn.Module, calibration: Calibration) -> SearchRecord:
    """How ranges were found in the observed values of the activation nodes that are on, or of all where none is."""
    nodes = [node for node in named_nodes(model).values() if node.role is not Role.GEMM_WEIGHT]
    on = [node for node in nodes if node.setting.enabled] or nodes
    methods = sorted({method.for_bits(node.setting.bits) for node in on})
    return {
        "method": "+".join(methods),
        "percentile": method.percentile if "percentile" in methods else None,
        "dead_nodes": calibration.dead,
        **bits_record(model, method),
    }


def split_passes(record: CalibrationRecord) -> tuple[list[str], list[str]]:
    """The names of the passes that were kept, and of those that were taken back."""
    ran = record.get("passes", [])
    return [one["name"] for one in ran if one["kept"]], [one["name"] for one in ran if not one["kept"]]


def tell_advice(advice: Sequence[Advice]) -> list[AdviceRecord]:
    """Say it, warnings first and then a handful of hints; all of it as a run card keeps it."""
    hints = [one for one in advice if not one.warns]
    for one in advice:
        if one.warns:
            log.warning(one.text)
    for one in hints[:_SHOWN]:
        log.info("advice: %s", one.text)
    if len(hints) > _SHOWN:
        log.info("advice: %d more in the run card", len(hints) - _SHOWN)
    plain = str.maketrans("", "", "‹›")  # marks of fields, for the flags of a command
    return [AdviceRecord(kind=one.kind, text=one.text.translate(plain), nodes=list(one.nodes)) for one in advice]
