"""A calibration: its pictures, its result with record and advice, and ranges searched anew in its statistics."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, finite, sha256_of
from swin_quant.base.progress import log, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import (
    AdviceRecord,
    CalibrationRecord,
    CheckpointRecord,
    CheckRecord,
    CoverageRecord,
    PassRecord,
    SearchRecord,
    SourceRecord,
)
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.opened import Checkpoint, OpenedCheckpoint, open_checkpoint
from swin_quant.checkpoint.ranges import bits_record
from swin_quant.data.loader import DrawnBatches, Numbered
from swin_quant.data.picture_set import batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Transform
from swin_quant.data.sampling import Sampling, digest
from swin_quant.loading import refuse_changed_features
from swin_quant.model import Model
from swin_quant.models import build_model
from swin_quant.models.placement import coverage
from swin_quant.quant import CALIBRATED_ON
from swin_quant.quant.advice import OF_PICTURES, Advice, Findings, advise, figures_of
from swin_quant.quant.calibration import Calibration, Method, observing, set_ranges
from swin_quant.quant.check import PICTURES, RUIN_DB, CheckBatch, check_ranges
from swin_quant.quant.outlier_channels import OutlierChannels
from swin_quant.quant.passes import choosing_ranges
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policy import Policy, apply_policy, enabled_nodes
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.statistics_file import SUFFIX, read_calibration
from swin_quant.quant.watch import eval_mode
from swin_quant.verbs.calibration_passes import choose, improve, of_weights, outliers_left

BATCH = 8  # pictures at a time, at most


@dataclass(frozen=True)
class CalibrationPlan(Sampling):
    """Which pictures calibrate, and how ranges are chosen from them."""

    count: int = CALIBRATED_ON
    batch_size: int = BATCH
    augment: bool = False
    method: Method = Method()
    passes: PassPlan = PassPlan()

    @classmethod
    def of(cls, pictures: int | None = None, batch: int | None = None, **how: Any) -> "CalibrationPlan":
        """A plan for a number of pictures, in the largest batches that divide it: ranges do not depend on batches."""
        count = CALIBRATED_ON if pictures is None else pictures
        largest = min(batch or BATCH, BATCH)
        size = next(size for size in range(max(largest, 1), 0, -1) if count % size == 0)
        return cls(count, batch_size=size, **how)


@dataclass(frozen=True)
class CalibrationBatches:
    """This rank's numbered batches to calibrate on; `size` pictures a number. `record`: the run card's part on the
    batches that were seen. `class_names`: those of the pictures."""

    batches: Iterable[Numbered]
    size: int
    record: Callable[[Sequence[Numbered]], CalibrationRecord]
    class_names: Sequence[str] = ()


def of_pictures(
    pictures: Pictures, transform: Transform, plan: CalibrationPlan, world: World, workers: int = 0
) -> CalibrationBatches:
    """This rank's share of a seeded sample."""
    drawn = DrawnBatches(pictures, transform, plan, world, workers)

    def record(_: Sequence[Numbered]) -> CalibrationRecord:
        unreadable, names = drawn.unreadable(), drawn.names()
        sampled = {"batches": drawn.count, "batch_size": drawn.size, "seed": plan.seed, "split": plan.split}
        used = {"pictures_sha256": digest(names), "files": names, "unreadable": unreadable}
        return cast("CalibrationRecord", {**sampled, "augment": plan.augment, **used})

    shown = track(drawn, "calibrating", len(drawn), "batches")
    return CalibrationBatches(shown, drawn.size, record, pictures.class_names)


def of_tensors(source: Iterable[Any], prepared: Prepared) -> CalibrationBatches:
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


_SHOWN = 5  # lines of advice on the screen, beside warnings


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration and its record; this rank's numbered batches, and its part of the first pictures for the check.

    `outlier_channels`: the channels that still stand out behind the passes.
    """

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: Sequence[CheckBatch]
    images: Sequence[tuple[int, Tensor]] = ()
    outlier_channels: Sequence[OutlierChannels] = ()

    def improved(
        self,
        model: nn.Module,
        plan: PassPlan,
        world: World,
        before: RunCard | None = None,
        scratch: Scratch = Scratch(),
    ) -> "CalibrationResult":
        """The result behind the passes of `plan`, recorded with the passes that the weights have seen `before`.

        Calibrator auto chooses methods between passes: behind the last one after which ranges are observed anew.
        """
        earlier = of_weights(before)
        if len(_sizes(self.images)) > 1:
            return self._of_several_sizes(plan, earlier)
        method, record, (first, then) = self.method, self.record, plan.around_ranges()
        with eval_mode(model):
            calibration, done = improve(model, self.calibration, self.images, method, first, world, scratch)
            if method.is_auto:
                method = choose(model, calibration, self.images, method, world)
                record = {**record, **search_record(method, model, calibration)}
            calibration, more = improve(model, calibration, self.images, method, then, world, scratch)
            if passes := [*earlier, *done, *more]:
                again = search_record(method, model, calibration)
                record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
            outlier_channels = outliers_left(model, self.images, passes, world)
        return replace(self, calibration=calibration, record=record, method=method, outlier_channels=outlier_channels)

    def _of_several_sizes(self, plan: PassPlan, earlier: list[PassRecord]) -> "CalibrationResult":
        if plan.steps or self.method.is_auto:
            what = "‹passes›" if plan.steps else "‹calibrator› auto"
            raise UsageError(
                f"{what}: needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE square"
            )
        return replace(self, record={**self.record, "passes": earlier}) if earlier else self

    def checked(self, model: nn.Module, policy: Policy, world: World) -> CalibrationRecord:
        """The record, with the cost of the ranges under `policy`, which is applied, and advice, which is also
        logged."""
        check = check_ranges(model, self.calibration, self.method, self.some)
        passes = [one["name"] for one in self.record.get("passes", []) if one["kept"]]
        nodes = named_nodes(model)
        found = Findings(nodes, self.calibration, self.method, policy.name, check, passes, self.outlier_channels)
        record: CalibrationRecord = {**self.record, "advice": tell_advice(advise(found), world)}
        if products := getattr(model, "products", ()):
            every = model.named_modules(remove_duplicate=False)  # a shared layer is called by any of its names
            enabled = [name for name, one in every if isinstance(one, Quantizer) and one.setting.enabled]
            covered = coverage(products, enabled)
            record["coverage"] = cast(CoverageRecord, asdict(covered))
            if world.is_main:
                log.info("%s: %s", policy.name, covered)
        if check is None:
            return record
        if world.is_main and not check.better and check.sqnr_db >= RUIN_DB:
            log.info("%s: %s", policy.name, figures_of(check))
        cost = CheckRecord(
            policy=policy.name,
            pictures=check.pictures,
            agreement=check.agreement,
            sqnr_db=finite(check.sqnr_db),
            others=finite(check.others),
            at_fault=list(check.at_fault),
        )
        return {**record, "check": cost}


def _sizes(images: Sequence[tuple[int, Tensor]]) -> set[tuple[int, ...]]:
    """[3, H, W] of the pictures of all ranks; an empty batch may be of any."""
    return {tuple(size) for size in gather([list(batch.shape[1:]) for _, batch in images if len(batch)])}


def calibrated_on(model: nn.Module, shown: CalibrationBatches, method: Method) -> CalibrationResult:
    """Calibrate `model`: show it each batch, then search the ranges."""
    device = next(model.parameters()).device
    seen: list[Numbered] = []
    some: list[CheckBatch] = []
    with observing(model, method) as observation:
        for number, batch in shown.batches:
            images = batch.images.to(device)
            logits = observation.show(images)
            seen.append((number, replace(batch, images=images)))
            if (wanted := PICTURES - number * shown.size) > 0:
                some.append(CheckBatch(number, images[:wanted], logits[:wanted]))
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


def _methods(model: nn.Module, method: Method) -> list[str]:
    """The range methods of the activation nodes that are on, or of all where none is."""
    nodes = [node for node in named_nodes(model).values() if node.role is not Role.GEMM_WEIGHT]
    on = [node for node in nodes if node.setting.enabled] or nodes
    return sorted({method.for_node(node.name, node.setting.bits) for node in on})


def search_record(method: Method, model: nn.Module, calibration: Calibration) -> SearchRecord:
    """How ranges were found in the observed values."""
    methods = _methods(model, method)
    return {
        "method": "+".join(methods),
        "percentile": method.percentile if "percentile" in methods else None,
        "dead_nodes": calibration.dead,
        **bits_record(model, method),
    }


def tell_advice(advice: Sequence[Advice], world: World) -> list[AdviceRecord]:
    """Say it on rank 0, warnings first and then a handful of hints; all of it as a run card keeps it."""
    hints = [one for one in advice if not one.warns]
    if world.is_main:
        for one in advice:
            if one.warns:
                log.warning(one.text)
        for one in hints[:_SHOWN]:
            log.info("advice: %s", one.text)
        if len(hints) > _SHOWN:
            log.info("advice: %d more in the run card", len(hints) - _SHOWN)
    plain = str.maketrans("", "", "‹›")  # marks of fields, for the flags of a command
    return [AdviceRecord(kind=one.kind, text=one.text.translate(plain), nodes=list(one.nodes)) for one in advice]


def recalibrate(
    cfg: CfgNode,
    statistics: str | Path,
    checkpoint: Checkpoint | None,
    policy: Policy,
    method: Method,
    output: str | Path,
    world: World = World(),
) -> Model:
    """The same model as `calibrate_checkpoint` gives on the same pictures, to the bit.

    `checkpoint` None is the calibrated one beside the statistics, which has the weights. SwinQuantError if the run card
    beside the statistics belongs to other statistics, or if they were counted on another checkpoint.
    """
    if method.is_auto:
        raise UsageError(
            "‹calibrator› auto: looks at pictures, and statistics hold none: calibrate on them, or name one"
        )
    if world.is_main:
        ensure_writable_dir(output)
    before, searched, calibrated = _card_of(Path(statistics))
    checkpoint = open_checkpoint(checkpoint or calibrated_beside(statistics))
    _check_counted_on(checkpoint, statistics, before.source, searched, calibrated)
    refuse_changed_features(str(checkpoint), before, cfg)
    model = build_model(cfg)
    load_float(model, checkpoint)
    apply_policy(model, policy)
    model.to(world.device)

    names = [name for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT]
    calibration = read_calibration(statistics, names, searched["pictures"])
    if not calibration.ends and (
        unsigned := [name for name, node in enabled_nodes(model).items() if not node.setting.symmetric]
    ):
        raise UsageError(
            f"{statistics}: was written before signs were kept, and policy {policy.name} has zero points at "
            f"{listed(unsigned, 2)}: calibrate again, or give a symmetric ‹policy›"
        )
    set_ranges(model, calibration, method)
    advice = _advice_again(model, calibration, method, policy, searched, world)
    gather([])  # before rank 0 may replace files that other ranks still read
    for key in ("node_methods", "tried_percentile", "check"):  # figures of the earlier ranges
        searched.pop(key, None)  # type: ignore[misc]
    searched = {**searched, **search_record(method, model, calibration), "advice": advice}
    card = RunCard(
        name=cfg.MODEL.NAME,
        config=before.config,
        preprocess=before.preprocess,
        source=before.source,
        policy=policy.to_dict(),
        training=calibrated_again(before),
        calibration=searched,
        class_names=before.class_names,
    )
    done = Model(model, card=card)
    done.calibration = calibration
    done.save_in(Path(output), world)
    return done


def _check_counted_on(
    checkpoint: OpenedCheckpoint,
    statistics: str | Path,
    source: SourceRecord | None,
    searched: CalibrationRecord,
    calibrated: CheckpointRecord,
) -> None:
    """UsageError if a pass chose the ranges, SwinQuantError for statistics of another checkpoint."""
    if settled := choosing_ranges(searched.get("passes", [])):
        raise UsageError(f"{checkpoint}: ranges were chosen by {settled[-1]}: calibrate again, with pictures")
    changed = any(one["kept"] for one in searched.get("passes", []))  # then the source has other weights
    counted_on = (calibrated,) if changed else (source, calibrated)
    if checkpoint.sha256 not in [record["sha256"] for record in counted_on if record]:
        raise SwinQuantError(
            f"{checkpoint}: is not the checkpoint of {statistics}: leave it out, or name the right one"
        )


def _advice_again(
    model: nn.Module,
    calibration: Calibration,
    method: Method,
    policy: Policy,
    searched: CalibrationRecord,
    world: World,
) -> list[AdviceRecord]:
    """Advice on the new ranges, and the earlier advice that pictures gave."""
    passes = [one["name"] for one in searched.get("passes", []) if one["kept"]]
    found = Findings(named_nodes(model), calibration, method, policy.name, passes=passes)
    shown = [one for one in searched.get("advice", []) if one["kind"] in OF_PICTURES]
    still = [Advice(one["kind"], one["text"], tuple(one["nodes"])) for one in shown]
    return tell_advice([*advise(found), *still], world)


def calibrated_beside(statistics: str | Path) -> Path:
    """The calibrated checkpoint that a statistics file belongs to."""
    return Path(statistics).with_name(_card_of(Path(statistics))[2]["file"])


def _card_of(statistics: Path) -> tuple[RunCard, CalibrationRecord, CheckpointRecord]:
    """The run card of a statistics file, its calibration and its checkpoint. SwinQuantError where the hash differs."""
    if not statistics.is_file():
        raise SwinQuantError(f"{statistics}: no such statistics file (*{SUFFIX})")
    path = statistics.with_name(statistics.name.removesuffix(SUFFIX) + ".json")
    if not path.is_file():
        raise SwinQuantError(f"{statistics}: has no run card {path.name} beside it: calibrate again")
    card = RunCard.read(path)
    record = card.calibration.get("statistics") if card.calibration else None
    if record is None or card.calibration is None or card.checkpoint is None:
        raise SwinQuantError(f"{path}: records no statistics (calibrator max keeps none): calibrate again")
    if sha256_of(statistics) != record["sha256"]:
        raise SwinQuantError(f"{statistics}: is not the statistics file of its run card {path.name}: one was replaced")
    return card, card.calibration, card.checkpoint
