"""Post-training quantization, start to end: float checkpoint and pictures in, calibrated checkpoint and card out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again, made_before, original
from swin_quant.cards.records import (
    CalibrationRecord,
)
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.class_names import names_of
from swin_quant.config.families import Family, families
from swin_quant.config.geometry import check_channels
from swin_quant.config.portable import portable_config
from swin_quant.data.calibration import calibration_batches
from swin_quant.data.class_names import stated
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess, Transform, augmented
from swin_quant.data.sampling import digest
from swin_quant.data.sources import open_unlabelled
from swin_quant.loading import refuse_changed_features
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.saving import Calibrated, finish_in
from swin_quant.tasks.calibration_found import Found, calibrate_numbered, found_by
from swin_quant.tasks.passes import PassPlan


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

    Where something was made of another one of that name, it is called `<NAME>_calib_<policy>.pth`.
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
    before = made_before(checkpoint, source is not None and source.calibrated)
    if checkpoint is None:
        log.warning("no checkpoint: these are random weights, good for timing only")
    elif source and not source.calibrated and path.exists() and path.samefile(checkpoint):
        raise UsageError(f"‹output› {output}: the result would be written over {checkpoint}: give another folder")
    refuse_changed_features(str(checkpoint), before, cfg)
    apply_policy(model, policy)
    passes = plan.passes.for_model(model)
    model.to(world.device)

    preprocess = Preprocess.from_config(cfg)
    named = names_of(cfg, source.path if source else None, replace_head)
    pictures, transform = open_calibrating(cfg, plan), _transform(cfg, preprocess, plan)
    found = calibrate_pictures(model, pictures, transform, plan, world, _workers(cfg, plan, world))
    scratch = Scratch(path.with_suffix(".passes"), writes=world.is_main)
    found = found.improved(model, passes, world, before, scratch)
    record = found.checked(model, policy, world)
    card = RunCard(
        name=cfg.MODEL.NAME,
        config=portable_config(cfg),
        preprocess=preprocess.to_dict(),
        source=original(before, source.record() if source else None),
        policy=policy.to_dict(),
        calibration=record,
        training=calibrated_again(before),
        class_names=named or stated(pictures.class_names, cfg.MODEL.NUM_CLASSES),
    )
    done = finish_in(Path(output), model, card, found.calibration, world)
    scratch.clear()
    return done


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
    wanted = plan.batches * plan.batch_size
    numbered = calibration_batches(
        pictures, transform, wanted, plan.batch_size, plan.seed, limit, world.rank, world.size, workers
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


def open_calibrating(cfg: CfgNode, plan: CalibrationPlan) -> Pictures:
    """The pictures of which `plan` draws its sample."""
    return open_unlabelled(cfg, plan.split)


def _transform(cfg: CfgNode, preprocess: Preprocess, plan: CalibrationPlan) -> Transform:
    return augmented(cfg, plan.seed) if plan.augment else preprocess


def _workers(cfg: CfgNode, plan: CalibrationPlan, world: World) -> int:
    return default_workers(cfg.DATA.NUM_WORKERS, world.size, plan.batches * plan.batch_size)


def unnamed_policy(cfg: CfgNode | None) -> Policy:
    """The policy to calibrate under where nobody names one: that of the model's family."""
    return load_policy((families()[cfg.MODEL.TYPE] if cfg else Family).policy)


def tell_unnamed(policy: Policy) -> None:
    """Say which policy is scored though nobody named it."""
    log.info("policy %s, since none is named (%s): name the one that is to be deployed, `swin-quant policies` says for "
             "which engine each is", policy.name, policy.description.rstrip("."))  # fmt: skip
