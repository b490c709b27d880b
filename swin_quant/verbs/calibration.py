"""The observation behind a calibration: a seeded sample of a place or a user's batches, ranges, and their record; the
passes and the advice behind it, on its own pictures."""

import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError, as_flags, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import clock, log, span, track
from swin_quant.cards import records
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CalibrationRecord, PassRecord
from swin_quant.checkpoint.ranges import bits_record
from swin_quant.data.loader import Batch, DrawnBatches
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import digest
from swin_quant.model import passes_in_weights
from swin_quant.models.classifier import Classifier
from swin_quant.models.placement import coverage
from swin_quant.models.registry import list_exchanges, list_padded_modules, list_units
from swin_quant.quant import CALIBRATED_ON
from swin_quant.quant.advice import Findings, advise, format_figures
from swin_quant.quant.calibration import Calibration, Method, calibrate, observing, set_ranges
from swin_quant.quant.check import PICTURES, RUIN_DB, Shown, check_ranges
from swin_quant.quant.fold import list_foldable_norms
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import NO_GAIN, OutlierChannels, outlier_channels
from swin_quant.quant.passes.run import CORRECTED, EVENED, PassPlan, run_passes
from swin_quant.quant.policy import Policy, enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.watch import eval_mode

_CHECKED = 100  # forward passes of pictures behind the observation: outlier channels, and the check of ranges
_BATCH = 8  # pictures at a time: at most for the observation, always for passes
_SHOWN = 5  # lines of advice on the screen, beside warnings


@dataclass(frozen=True)
class CalibrationBatches:
    """Batches to calibrate on.

    Args:
        batches: The batches.
        record: The run card's part on the batches that were seen.
        class_names: Those of the pictures.
        count: How many pictures, if that is known.
    """

    batches: Iterable[Batch]
    record: Callable[[Sequence[Batch]], CalibrationRecord]
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
    # Each picture is read once: the config's default, to hold a rank's part of a zip, would read all of them.
    opened = replace(found, cache_mode="no" if found.cache_mode == "part" else found.cache_mode).open()
    count = min(len(opened), CALIBRATED_ON) if found.count is None else found.count
    largest = max(min(found.batch or _BATCH, _BATCH), 1)
    size = next(size for size in range(largest, 0, -1) if count % size == 0)
    seed, split = found.seed or 0, found.split or ""
    drawn = DrawnBatches(opened, transform, count, seed, size, found.max_unreadable or 0.0)

    def record(_: Sequence[Batch]) -> CalibrationRecord:
        unreadable, names = drawn.unreadable(), drawn.names()
        if unreadable:
            log.warning("%d of %d pictures are unreadable: %s", len(unreadable), len(opened), listed(unreadable))
        sampled = {"batches": drawn.count, "batch_size": drawn.size, "seed": seed, "split": split}
        used = {"pictures_sha256": digest(names), "files": names, "unreadable": unreadable}
        return cast("CalibrationRecord", {**sampled, "augment": augment, "place": Path(found.path).name, **used})

    shown = track(drawn, "running the model", len(drawn), "batches")
    return CalibrationBatches(shown, record, opened.class_names, count)


def take(source: Iterable[Any], prepared: Prepared) -> CalibrationBatches:
    """Batches of any size; a hash of their values stands for names."""
    total = len(source) if isinstance(source, Sized) else None

    def record(seen: Sequence[Batch]) -> CalibrationRecord:
        values = hashlib.sha256()
        for batch in seen:
            values.update(batch.images.numpy(force=True).tobytes())
        size = max(len(batch.images) for batch in seen)
        sampled = {"batches": len(seen), "batch_size": size, "seed": 0, "split": "", "augment": False}
        known = {"pictures_sha256": values.hexdigest(), "files": [], "unreadable": []}
        return cast("CalibrationRecord", {**sampled, **known})

    made = batches(source, labelled=False, prepared=prepared)
    return CalibrationBatches(track(made, "running the model", total, "batches"), record)


class Observed(NamedTuple):
    """A calibration and its record; its batches, and the first pictures with their logits, for the check."""

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: list[Shown]
    images: list[Tensor]


def observe_batches(model: nn.Module, shown: CalibrationBatches, method: Method, has_passes: bool = False) -> Observed:
    """Calibrate `model`: show it each batch, then search the ranges. `has_passes`: passes follow, which take longer."""
    device = next(model.parameters()).device
    seen: list[Batch] = []
    some: list[Shown] = []
    start, before = clock(), 0
    with observing(model, method) as observation:
        for batch in shown.batches:
            images = batch.images.to(device)
            logits = observation.show(images)
            seen.append(replace(batch, images=images))
            if len(seen) == 1:  # which tries how batches can run
                start = clock()
            elif len(seen) == 2 and shown.count:
                seconds = (shown.count + _CHECKED) * (clock() - start) / max(len(images), 1)
                log.info("calibration takes about %s in all%s", span(seconds), ", then come the passes" * has_passes)
            if (wanted := PICTURES - before) > 0:
                some.append((images[:wanted], logits[:wanted]))
            before += len(images)
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
    return Observed(calibration, record, method, some, [batch.images for batch in seen])


def search_record(method: Method, model: nn.Module, calibration: Calibration) -> records.SearchRecord:
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


def improve(
    context: PassContext, calibration: Calibration, images: Sequence[Tensor], plan: PassPlan
) -> tuple[Calibration, list[PassRecord]]:
    """Run the passes of `plan` on a calibrated model under its policy: the last calibration, and a record a pass.

    `images`: the batches that calibrated it.
    """
    steps, model, method = plan.steps, context.model, context.method
    if not steps and not (plan.automatic and _is_known(model) and enabled_nodes(model)):
        return calibration, []
    if not _is_known(model):
        names = ", ".join(step.name for step in steps)
        raise SwinQuantError(
            f"{names}: {type(model).__name__} names no units, which passes go through: sq.wrap finds those of a network"
        )
    if not steps and context.units:  # the passes that run where none is asked for
        if found := outlier_channels(context):
            worst = max(found, key=lambda one: one.times)
            told = "outlier channels in %d place%s (%s: %.0f times the median): equalize runs; ‹passes› none skips it"
            log.info(told, len(found), "s" if len(found) > 1 else "", worst.place, worst.times)
            steps += EVENED
        is_wrapped = getattr(model, "architecture", None) is None  # its float network stays in memory, for deltas
        steps += CORRECTED if is_wrapped and list_foldable_norms(model) else ()
    if not steps:
        return calibration, []

    def observe_again() -> Calibration:
        return calibrate(model, images, method)

    calibration, records = run_passes(context, steps, calibration, observe_again)
    if lost := [one["name"] for one in records if not one["kept"]]:
        log.warning("taken back, because the logits came out worse: %s", listed(lost))
    return calibration, finite(records)


def outliers_left(context: PassContext, passes: Sequence[PassRecord]) -> list[OutlierChannels]:
    """Outlier channels in the first pictures that these passes left; of those tried in vain, only beside enabled
    nodes."""
    enabled = enabled_nodes(context.model)
    ran = [one for one in passes if one["name"] == "equalize"]
    exchanged = any(one["kept"] and not one["note"].startswith(NO_GAIN) for one in ran)
    if not _is_known(context.model) or not enabled or exchanged:
        return []
    on = {name for node in enabled for name in (node, node.rpartition(".")[0])}
    return [one for one in outlier_channels(context) if not ran or on & {one.place, *one.cure}]


def _is_known(model: nn.Module) -> bool:
    return isinstance(model, Classifier) and (model.architecture is not None or bool(model.own_units))


def make_context(model: nn.Module, images: Sequence[Tensor], method: Method) -> PassContext:
    """The context of passes on a model: the pictures of batches in their order, in batches of _BATCH."""
    batches = [batch for batch in images if len(batch)]
    pictures = list(torch.cat(batches).split(_BATCH)) if batches else []
    if not _is_known(model):
        return PassContext(model, pictures, method, changes=False)
    return PassContext(model, pictures, method, list_units(model), list_exchanges(model), list_padded_modules(model))


def improved(
    model: nn.Module, found: Observed, plan: PassPlan, before: RunCard | None, policy: Policy
) -> tuple[Calibration, CalibrationRecord]:
    """Run the passes of `plan` behind an observation, then check the ranges under `policy`, which is applied.

    Returns the last calibration, and its record with the passes that the weights have seen, those of `before` too, the
    cost of the ranges, and advice, which is also said: warnings first, and then a handful of hints.
    """
    calibration, record, method = found.calibration, found.record, found.method
    passes, channels = passes_in_weights(before), list[OutlierChannels]()
    if len({batch.shape[1:] for batch in found.images if len(batch)}) > 1:  # an empty batch may be of any size
        if plan.steps:
            what = "needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE square"
            raise UsageError(f"‹passes›: {what}")
        record = {**record, "passes": passes} if passes else record
    else:
        with eval_mode(model):
            context = make_context(model, found.images, method)
            calibration, done = improve(context, calibration, found.images, plan)
            if passes := [*passes, *done]:
                again = search_record(method, model, calibration)
                record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
            channels = outliers_left(context, passes)
    check = check_ranges(model, calibration, method, found.some)
    ran = record.get("passes", [])
    kept, taken_back = ([one["name"] for one in ran if one["kept"] is is_kept] for is_kept in (True, False))
    advice = advise(Findings(named_nodes(model), calibration, method, policy.name, check, kept, taken_back, channels))
    hints = [one for one in advice if not one.warns]
    for one in advice:
        if one.warns:
            log.warning(one.text)
    for one in hints[:_SHOWN]:
        log.info("advice: %s", one.text)
    if len(hints) > _SHOWN:
        log.info("advice: %d more in the run card", len(hints) - _SHOWN)
    told = [records.AdviceRecord(kind=one.kind, text=as_flags(one.text), nodes=list(one.nodes)) for one in advice]
    record = {**record, "advice": told}
    if products := getattr(model, "products", ()):
        every = model.named_modules(remove_duplicate=False)  # a shared layer is called by any of its names
        covered = coverage(products, [key for key, one in every if isinstance(one, Quantizer) and one.setting.enabled])
        record["coverage"] = cast(records.CoverageRecord, asdict(covered))
        log.info("%s: %s", policy.name, covered)
    if check is not None:
        if not check.better and check.sqnr_db >= RUIN_DB:
            log.info("%s: %s", policy.name, format_figures(check))
        record["check"] = records.CheckRecord(
            policy=policy.name,
            pictures=check.pictures,
            agreement=check.agreement,
            sqnr_db=finite(check.sqnr_db),
            others=finite(check.others),
            at_fault=list(check.at_fault),
        )
    return calibration, record
