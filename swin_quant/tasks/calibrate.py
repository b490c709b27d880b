"""Post-training quantization, start to end: float checkpoint and pictures in, calibrated checkpoint and card out."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, finite, sha256_of
from swin_quant.base.progress import log, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import card_of
from swin_quant.cards.records import (
    CalibrationRecord,
    CheckpointRecord,
    CheckRecord,
    RangesRecord,
    SearchRecord,
    TrainingRecord,
)
from swin_quant.checkpoint import Source, load_float, save_calibrated
from swin_quant.checkpoint.range_bits import bits_record
from swin_quant.config.geometry import check_channels
from swin_quant.config.portable import portable_config
from swin_quant.data.calibration import calibration_batches
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess, Transform, augmented
from swin_quant.data.sampling import digest
from swin_quant.data.sources import open_pictures
from swin_quant.models import build_model
from swin_quant.quant.advice import Findings, advise, figures_of
from swin_quant.quant.calibration import Calibration, Method, calibrate
from swin_quant.quant.check import PICTURES, RUIN_DB, CheckBatch, check_ranges
from swin_quant.quant.names import AUTO
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.spread import MOST
from swin_quant.quant.standouts import Standout
from swin_quant.quant.statistics_file import SUFFIX, statistics_bytes
from swin_quant.tasks.advice import told
from swin_quant.tasks.passes import PassPlan, choose, improve, standing_out


@dataclass(frozen=True)
class CalibrationPlan:
    """Which pictures calibrate, and how ranges are chosen from them: `batches` of `batch_size`, seeded from `split`."""

    batches: int = 10
    batch_size: int = 8
    split: str = "train"
    seed: int = 0
    augment: bool = False
    method: Method = Method()
    max_unreadable: float = 0.01
    passes: PassPlan = PassPlan()

    def __post_init__(self) -> None:
        for field, value in (("‹pictures›", self.batches), ("‹batch›", self.batch_size)):
            if value < 1:
                raise UsageError(f"{field} {value}: must be at least 1")
        if self.method.name not in (None, *RANGE_METHODS, AUTO):
            raise UsageError(f"‹calibrator› {self.method.name}: must be one of {', '.join((*RANGE_METHODS, AUTO))}")
        if not 0 < self.method.percentile <= 100:
            raise UsageError(f"‹percentile› {self.method.percentile}: must be above 0 and at most 100")


@dataclass(frozen=True)
class Calibrated:
    """A calibrated model with its policy applied, where it was saved, and its card."""

    model: nn.Module
    checkpoint: Path
    card: RunCard


def calibrate_checkpoint(
    cfg: CfgNode,
    checkpoint: str | None,
    policy: Policy,
    plan: CalibrationPlan,
    output: str | Path,
    world: World = World(),  # noqa: B008
    replace_head: bool = False,
) -> Calibrated:
    """Calibrate `checkpoint` (any format of `swin_quant.checkpoint`) and write `<NAME>_calib.pth` and its run card.

    What was counted is kept in `<NAME>_calib.stats.npz` (not by `max`, which counts nothing). Everything that can be
    refused is refused before the first forward. Where it is cut off in a long pass, the next call with the same
    arguments goes on there: what is done lies in the folder `<NAME>_calib.passes`. `checkpoint` None calibrates the
    seeded random weights of the config, for timing. Every rank returns the same ranges; rank 0 writes.
    """
    check_channels(cfg)
    path = Path(output) / f"{cfg.MODEL.NAME}_calib.pth"
    if world.is_main:
        ensure_writable_dir(output)
    torch.manual_seed(cfg.SEED)
    model = build_model(cfg)
    source = load_float(model, checkpoint, replace_head=replace_head) if checkpoint else None
    before = trained_before(checkpoint, source)
    if checkpoint is None:
        log.warning("no checkpoint: these are random weights, good for timing only")
    elif source and not source.calibrated and path.exists() and path.samefile(checkpoint):
        raise UsageError(f"‹output› {output}: the result would be written over {checkpoint}: give another folder")
    apply_policy(model, policy)
    passes = plan.passes.for_model(model)
    model.to(world.device)

    preprocess = Preprocess.from_config(cfg)
    pictures, transform = _open(cfg, plan), _transform(cfg, preprocess, plan)
    found = calibrate_pictures(model, pictures, transform, plan, world, _workers(cfg, plan, world))
    scratch = Scratch(path.with_suffix(".passes"), writes=world.is_main)
    found = found.improved(model, passes, world, before, scratch)
    record = found.checked(model, policy, world)
    card = RunCard(
        name=cfg.MODEL.NAME,
        config=portable_config(cfg),
        preprocess=preprocess.to_dict(),
        source=before.source if before else source.record() if source else None,
        policy=policy.to_dict(),
        calibration=record,
        training=calibrated_again(before),
    )
    done = finish(model, path, card, found.calibration, world)
    scratch.clear()
    return done


def finish(model: nn.Module, path: Path, card: RunCard, calibration: Calibration, world: World) -> Calibrated:
    """Write checkpoint, statistics and card, in this order."""
    peaks = calibration.peaks if calibration.pictures <= MOST else {}
    counted = statistics_bytes(calibration.statistics, peaks) if calibration.statistics else None
    kept = path.with_suffix(SUFFIX)
    record = CheckpointRecord(file=kept.name, sha256=hashlib.sha256(counted).hexdigest()) if counted else None
    if card.calibration:
        card = replace(card, calibration={**card.calibration, "statistics": record})
    if world.is_main:
        card = save_with_card(model, path, card, others={kept: counted} if counted else {})
        if counted:
            log.info("statistics: %s", kept)
        else:
            kept.unlink(missing_ok=True)  # of an earlier calibration, whose checkpoint is gone, too
    return Calibrated(model, path, card)


def trained_before(checkpoint: str | None, source: Source | None) -> RunCard | None:
    """The card of a checkpoint with weights of its own: whatever is made from it came from the same original."""
    if checkpoint is None or source is None:
        return None
    try:
        card = card_of(checkpoint)
    except SwinQuantError:
        if source.calibrated:  # it may be QAT's
            raise
        return None  # some other JSON beside a float checkpoint
    return card if card and card.has_own_weights else None


def calibrated_again(before: RunCard | None) -> TrainingRecord | None:
    """How the weights were trained, for the card of new ranges; None where they were not (`trained_before`)."""
    as_calibrated = RangesRecord(weights=None, activations=None)
    return {**before.training, "ranges": as_calibrated} if before and before.training else None


def save_with_card(
    model: nn.Module, path: Path, card: RunCard, by_channel: bool = False, others: Mapping[Path, bytes] | None = None
) -> RunCard:
    """Write a calibrated checkpoint and the `others`, then the card that holds its hash; returns that card."""
    save_calibrated(model, path, by_channel)
    for other, content in (others or {}).items():
        atomic_write_bytes(other, content)
    card = replace(card, checkpoint={"file": path.name, "sha256": sha256_of(path)})
    card.write(path.with_suffix(".json"))
    for what, file in (("calibrated checkpoint", path), ("run card", path.with_suffix(".json"))):
        log.info("%s: %s", what, file)
    return card


@dataclass(frozen=True)
class Found:
    """What a calibration found, how it is recorded, this rank's numbered batches, its part of the first pictures, for
    the check, and the channels that stand out of what the passes left."""

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: Sequence[CheckBatch]
    images: Sequence[tuple[int, Tensor]] = ()
    standouts: Sequence[Standout] = ()

    def improved(
        self, model: nn.Module, plan: PassPlan, world: World, before: RunCard | None = None,
        scratch: Scratch = Scratch(),  # noqa: B008
    ) -> "Found":  # fmt: skip
        """What is found behind the passes of `plan`, and recorded with those that the weights have seen `before`.

        Calibrator auto chooses between them: behind those after which ranges are observed anew.
        """
        plan = plan.for_model(model)
        if len({batch.shape[1:] for _, batch in self.images}) > 1:
            return self._of_several_sizes(plan)
        recorded = before.calibration.get("passes", []) if before and before.calibration else []
        earlier = [one for one in recorded if one["kept"]]
        method, record, (first, then) = self.method, self.record, plan.around_ranges()
        calibration, done = improve(model, self.calibration, self.images, method, first, world, scratch)
        if method.is_auto:
            method = choose(model, calibration, self.images, method, world)
            record = {**record, **found_by(method, model, calibration)}
        calibration, more = improve(model, calibration, self.images, method, then, world, scratch)
        if passes := [*earlier, *done, *more]:
            again = found_by(method, model, calibration)
            record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
        standouts = standing_out(model, self.images, passes, world)
        return replace(self, calibration=calibration, record=record, method=method, standouts=standouts)

    def _of_several_sizes(self, plan: PassPlan) -> "Found":
        if plan.steps or self.method.is_auto:
            what = "‹passes›" if plan.steps else "‹calibrator› auto"
            raise UsageError(
                f"{what}: needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE square"
            )
        return self

    def checked(self, model: nn.Module, policy: Policy, world: World = World()) -> CalibrationRecord:  # noqa: B008
        """The record, with what the ranges cost under `policy`, which is applied, and advice, which is also said."""
        check = check_ranges(model, self.calibration, self.method, self.some)
        passes = [one["name"] for one in self.record.get("passes", []) if one["kept"]]
        nodes = named_nodes(model)
        found = Findings(nodes, self.calibration, self.method, policy.name, check, passes, self.standouts)
        record: CalibrationRecord = {**self.record, "advice": told(advise(found), world)}
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


def calibrate_pictures(
    model: nn.Module,
    pictures: Pictures,
    transform: Transform,
    plan: CalibrationPlan,
    world: World = World(),  # noqa: B008
    workers: int = 0,
) -> Found:
    """Give every node of `model` its range from a seeded sample of `pictures`, the same on any number of ranks."""
    if isinstance(transform, Preprocess) and not transform.is_square:
        plan = replace(plan, batches=plan.batches * plan.batch_size, batch_size=1)
    limit = UnreadableLimit(len(pictures), plan.max_unreadable)
    numbered = calibration_batches(
        pictures, transform, plan.batches, plan.batch_size, plan.seed, limit, world.rank, world.size, workers
    )
    used: list[tuple[int, list[str]]] = []

    def images() -> Iterator[tuple[int, Tensor]]:
        mine = len(range(world.rank, plan.batches, world.size))
        for number, batch in track(numbered, "calibrating", mine):
            used.append((number, [pictures.names[index] for index in batch.indices]))
            yield number, batch.images.to(world.device)

    calibration, some, kept = calibrate_numbered(model, images(), plan.method, plan.batch_size)
    limit.count(gather(limit.names))
    limit.check()
    names = [name for _, batch in sorted(gather(used)) for name in batch]
    record = CalibrationRecord(
        exact=plan.method.exact,
        batches=plan.batches,
        batch_size=plan.batch_size,
        seed=plan.seed,
        split=plan.split,
        augment=plan.augment,
        pictures=calibration.pictures,
        pictures_sha256=digest(names),
        files=names,
        unreadable=sorted(limit.names),
        beyond_half=calibration.beyond_half,
        check=None,
        statistics=None,
        advice=[],
        **found_by(plan.method, model, calibration),
    )
    return Found(calibration, record, plan.method, some, kept)


def calibrate_numbered(
    model: nn.Module, batches: Iterable[tuple[int, Tensor]], method: Method, batch_size: int
) -> tuple[Calibration, list[CheckBatch], list[tuple[int, Tensor]]]:
    """Calibrate on (number, images [B, 3, H, W]); also the first pictures with their float logits, and all batches."""
    shown: list[tuple[int, Tensor]] = []
    some: list[CheckBatch] = []

    def images() -> Iterator[Tensor]:
        for numbered in batches:
            shown.append(numbered)
            yield numbered[1]

    def keep(logits: Tensor) -> None:
        number, batch = shown[-1]
        if (wanted := PICTURES - number * batch_size) > 0:
            some.append(CheckBatch(number, batch[:wanted], logits[:wanted]))

    return calibrate(model, images(), method, keep), some, shown


def _open(cfg: CfgNode, plan: CalibrationPlan) -> Pictures:
    return open_pictures(
        cfg.DATA.DATA_PATH,
        plan.split,
        zip_mode=cfg.DATA.ZIP_MODE,
        cache_mode="no",  # a sample is read once
        num_classes=cfg.MODEL.NUM_CLASSES if cfg.DATA.ZIP_MODE else None,  # folders may be flat, maps have labels
    )


def _transform(cfg: CfgNode, preprocess: Preprocess, plan: CalibrationPlan) -> Transform:
    return augmented(cfg, plan.seed) if plan.augment else preprocess


def _workers(cfg: CfgNode, plan: CalibrationPlan, world: World) -> int:
    return default_workers(cfg.DATA.NUM_WORKERS, world.size, plan.batches * plan.batch_size)


def _methods(model: nn.Module, method: Method) -> list[str]:
    """The range methods of the activation nodes that are on, or of all where none is."""
    nodes = [node for node in named_nodes(model).values() if node.role is not Role.GEMM_WEIGHT]
    on = [node for node in nodes if node.enabled] or nodes
    return sorted({method.for_node(node.name, node.bits) for node in on})


def found_by(method: Method, model: nn.Module, calibration: Calibration) -> SearchRecord:
    """What a calibration record says of the search itself."""
    methods = _methods(model, method)
    return {
        "method": "+".join(methods),
        "percentile": method.percentile if "percentile" in methods else None,
        "dead_nodes": calibration.dead,
        **bits_record(model, method),
    }
