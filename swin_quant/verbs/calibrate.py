"""Calibrate a float checkpoint on pictures: writes <NAME>_calib.pth and its run card, then scores them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swin_quant.arguments import checked
from swin_quant.base.errors import SwinQuantError, UsageError, called
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import SourceRecord
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare, flags_given
from swin_quant.config.defaults import families
from swin_quant.config.load import check_channels
from swin_quant.config.outputs import LOGITS
from swin_quant.quant import CALIBRATED_ON, DEFAULT_PERCENTILE

if TYPE_CHECKING:
    from torch import nn
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import Checkpoint
    from swin_quant.data.picture_set import Source
    from swin_quant.model import Model
    from swin_quant.quant.passes.scratch import Scratch
    from swin_quant.quant.policy import Policy
    from swin_quant.verbs.calibration_result import CalibrationBatches, CalibrationPlan

EXAMPLES = """examples:
  swin-quant calibrate swin_tiny_patch4_window7_224.pth --data-path imagenet --policy ft-mode1 --output out
  swin-quant calibrate timm:resnet50 --data-path imagenet --policy cpu --output out    (any model of timm)
  swin-quant calibrate my.pth --cfg my.yaml --data-path data --calibrator mse --pictures 160
  torchrun --nproc_per_node 4 calibrate.py my.pth --data-path data --split val --no-eval
  swin-quant calibrate --statistics out/my_calib.stats.npz --policy qdq --aprec 4 --output out4 --no-eval
                                                         (ranges found again in saved histograms: no pictures)"""
KEPT = 16  # inputs that a wrapped module keeps
WRAPPED = "qdq-unsigned"  # the default policy of a wrapped module


@dataclass(frozen=True)
class SampleOptions:
    """Which pictures calibrate."""

    TITLE = "calibration"
    pictures: Annotated[int | None, Flag(f"how many calibrate (default {CALIBRATED_ON})", "N")] = None
    split: Annotated[str | None, Rare("pictures to sample (default train)", "SPLIT")] = None


@dataclass(frozen=True)
class CalibrateOptions:
    """The checkpoint to calibrate, its pictures, and the policies that score it."""

    checkpoint: Annotated[
        str | None, Flag("float checkpoint: Microsoft's, timm's, Hugging Face's, ours", "CHECKPOINT", or_flag=True)
    ] = None
    model: shared.ModelOptions = shared.ModelOptions()
    replace_head: shared.ReplaceHead = False
    output_kind: shared.OutputKind = None
    data: shared.ScoringOptions = shared.ScoringOptions()
    sample: SampleOptions = SampleOptions()
    ranges: shared.RangeOptions = shared.RangeOptions()
    passes: shared.PassOptions = shared.PassOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None
    no_eval: shared.NoEval = False
    augment: Annotated[bool, Rare("calibrate on augmented training crops")] = False
    statistics: Annotated[str | None, Rare("search ranges anew in what a calibration left: *.stats.npz", "FILE")] = None
    random_weights: Annotated[bool, Rare("without a checkpoint: time untrained weights")] = False


@checked
def calibrate(
    model: Model | nn.Module | str | Path,
    pictures: Source,
    policy: str | Policy | None = None,
    *,
    method: str | None = None,
    percentile: float = DEFAULT_PERCENTILE,
    exact: bool = False,
    passes: str | Sequence[Any] | None = None,
    folder: str | Path | None = None,
) -> Model:
    """Find the range of every node of `model` on `pictures`, and apply `policy`; the model is changed, and returned.

    `policy` None: ft-mode1 for a Swin, qdq-unsigned for a wrapped module, qdq for any other network. The ranges are
    those of `swin-quant calibrate` on the same pictures, to the bit, whatever the batches. `method` None is the one
    that suits a node's bits; "auto" picks, for each node, the one with the least output error. A warning says where the
    ranges lose the signal, and which method does better; `card.calibration` keeps all advice. `passes` come behind it:
    a recipe's name or file, or a list of passes, names or `{"name": ..., option: ...}`; None evens out channels that
    stand out, where there are any; [] does nothing. In `folder` long passes keep their finished parts until all is
    done: the same call goes on where one was cut off, with the same result. An error or an interrupt leaves the model
    as it was. SwinQuantError for NaN or infinity in weights or activations, naming the module.
    """
    from swin_quant.base.distributed import World
    from swin_quant.data.loader import default_workers
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.exported import model_of
    from swin_quant.quant.calibration import Method
    from swin_quant.quant.passes.recipe import load_passes, steps_of
    from swin_quant.quant.passes.run import PassPlan
    from swin_quant.quant.passes.scratch import Scratch
    from swin_quant.quant.passes.trial import all_or_nothing
    from swin_quant.quant.policy import load_policy
    from swin_quant.verbs.calibration_result import CalibrationPlan, of_pictures, of_tensors

    model, pictures = model_of(model), source_of(pictures)
    chosen = load_policy(policy) if policy else unnamed_policy(model.config if model.card.config else None)
    if policy is None:
        tell_unnamed(chosen)
    if isinstance(passes, str):
        steps = PassPlan.of(load_passes(passes))
    else:
        steps = PassPlan(steps_of(() if passes is None else passes), automatic=passes is None)
    with called(calibrator="method"):
        plan = CalibrationPlan(method=Method(method, percentile, exact), passes=steps)
    world = World(device=model.device)
    if isinstance(pictures, PictureSet):
        pictures = pictures.of_split("train")
        opened = pictures.open()
        if pictures.upright not in (None, model.preprocess.upright):
            log.warning(
                "%s: calibration and the run card turn pictures differently: set DATA.UPRIGHT of its config, or "
                "`upright` of its preprocess",
                model.name,
            )
        count = min(len(opened), CALIBRATED_ON) if pictures.count is None else pictures.count
        how: dict[str, Any] = {"split": pictures.split or "", "seed": pictures.seed}
        how |= {"max_unreadable": pictures.max_unreadable, "method": plan.method, "passes": steps}
        plan = CalibrationPlan.of(count, **how)
        workers = default_workers(pictures.workers, world.size, count)
        batches = of_pictures(opened, model.preprocess, plan, world, workers)
    else:
        batches = of_tensors(pictures, model.prepared)
    scratch = Scratch(Path(folder) / f"{model.name}_calib.passes") if folder is not None else Scratch()
    before = dict(vars(model))
    try:
        with all_or_nothing(model.module):
            calibrate_model(model, batches, chosen, plan, world, scratch)
    except BaseException:
        vars(model).update(before)
        raise
    scratch.clear()
    return model


def calibrate_model(
    model: Model, batches: CalibrationBatches, policy: Policy, plan: CalibrationPlan, world: World, scratch: Scratch
) -> None:
    """`calibrate` on `batches`, the same ranges on any number of ranks. An error may leave the model half changed."""
    from swin_quant.data.class_names import stated
    from swin_quant.quant.policy import apply_policy
    from swin_quant.verbs.calibration_result import calibrated_on

    source = _source(model)  # before passes change its weights
    is_known = bool(model.card.config) or model.keep_original()
    before = model.card if is_known and (model.card.has_own_weights or model.card.calibration) else None
    apply_policy(model.module, policy)
    passes = plan.passes.for_model(model.module)
    names = model.class_names
    if batches.class_names and not names:
        with contextlib.suppress(UsageError):  # it need not say how many classes it has
            names = stated(batches.class_names, model.classes)
    result = calibrated_on(model.module, batches, plan.method)
    result = result.improved(model.module, passes, world, before, scratch)
    model.card = model.card.with_new_weights(
        source=source,
        policy=policy.to_dict(),
        calibration=result.checked(model.module, policy, world),
        training=calibrated_again(before),
        checkpoint=None,
        class_names=names,
    )
    model.calibration, model.file = result.calibration, None
    if not model.card.config:
        model.keep_weights()
    model.examples = result.images[0][1][:KEPT].cpu() if model.card.wrapped and result.images else None


def _source(model: Model) -> SourceRecord | None:
    """The float file that the model was loaded from, if its weights are that file's own; else its card's source."""
    card, file = model.card, model.file
    if model.is_changed:
        return None
    if file is None or card.checkpoint is None or card.calibration or card.is_qat:
        return card.source
    kind, place = card.source["format"] if card.source else "swin-quant", str(file.resolve())
    return {"file": card.checkpoint["file"], "sha256": card.checkpoint["sha256"], "format": kind, "path": place}


def calibrate_checkpoint(
    cfg: CfgNode,
    checkpoint: Checkpoint | None,
    policy: Policy,
    plan: CalibrationPlan,
    output: str | Path,
    world: World | None = None,
    replace_head: bool = False,
) -> Model:
    """Calibrate `checkpoint` (any format of `swin_quant.checkpoint`) and write `<NAME>_calib.pth` and its run card.

    If files were made from another checkpoint of that name, the new one is `<NAME>_calib_<policy>.pth`.
    The histograms are kept in `<NAME>_calib.stats.npz` (calibrator max has none). Everything that can be
    refused is refused before the first forward. If a long pass is cut off, the next call with the
    same arguments resumes it: finished parts lie in the folder `<NAME>_calib.passes`. `checkpoint` None calibrates the
    seeded random weights of the config, for timing. Every rank returns the same ranges; rank 0 writes.
    """
    from swin_quant.base.distributed import World
    from swin_quant.data.loader import default_workers
    from swin_quant.data.picture_set import open_unlabelled
    from swin_quant.data.preprocess import augmented
    from swin_quant.loading import load_float_model
    from swin_quant.quant.passes.scratch import Scratch
    from swin_quant.quant.policy import apply_policy
    from swin_quant.verbs.calibration_result import of_pictures

    world = world or World()
    check_channels(cfg)
    path = Path(output) / f"{cfg.MODEL.NAME}_calib.pth"
    if world.is_main:
        ensure_writable_dir(output)
    model, source = load_float_model(cfg, checkpoint, world, replace_head)
    if checkpoint and not (source and source.calibrated) and path.exists() and path.samefile(checkpoint):
        raise UsageError(f"‹output› {output}: the result would be written over {checkpoint}: give another folder")
    apply_policy(model.module, policy)
    plan.passes.for_model(model.module)  # refused before pictures are looked for
    pictures = open_unlabelled(cfg, plan.split)
    transform = augmented(cfg, plan.seed) if plan.augment else model.preprocess
    workers = default_workers(cfg.DATA.NUM_WORKERS, world.size, plan.count)
    scratch = Scratch(path.with_suffix(".passes"), writes=world.is_main)
    calibrate_model(model, of_pictures(pictures, transform, plan, world, workers), policy, plan, world, scratch)
    model.save_in(Path(output), world)
    scratch.clear()
    return model


def run(options: CalibrateOptions, world: World) -> None:
    from swin_quant.verbs.calibration_result import calibrated_beside

    checkpoint, statistics = shared.opened(options.checkpoint), options.statistics
    if not checkpoint and not options.random_weights and not statistics:
        raise UsageError("no checkpoint: name one (or --random-weights to time an untrained model)")
    of_pictures = CalibrateOptions(
        sample=options.sample,
        ranges=shared.RangeOptions(exact_histogram=options.ranges.exact_histogram),
        passes=options.passes,
        augment=options.augment,
        replace_head=options.replace_head,
        random_weights=options.random_weights,
    )
    if statistics and (idle := flags_given(of_pictures)):
        raise UsageError(f"{idle[0]}: the pictures are those of --statistics: leave it out")
    if statistics and not checkpoint and not options.model.cfg:
        checkpoint = shared.opened(str(calibrated_beside(statistics)))
    keys = {"OUTPUT": options.output, "MODEL__OUTPUT_KIND": options.output_kind}
    cfg = shared.config_of(checkpoint, options.model, options.data, options.run, **keys)
    calibrate_and_score(options, checkpoint, cfg, plan_of(options, cfg), shared.output_dir(options.output, cfg), world)


def plan_of(options: CalibrateOptions, cfg: CfgNode) -> CalibrationPlan:
    """The pictures, ranges and passes that options ask for; the seed is the config's."""
    from swin_quant.verbs.calibration_result import CalibrationPlan

    return CalibrationPlan.of(
        options.sample.pictures,
        options.data.batch,
        split=options.sample.split or "train",
        seed=cfg.SEED,
        augment=options.augment,
        method=options.ranges.method(),
        max_unreadable=options.data.max_unreadable,
        passes=options.passes.plan(),
    )


def calibrate_and_score(
    options: CalibrateOptions,
    checkpoint: Checkpoint | None,
    cfg: CfgNode,
    plan: CalibrationPlan,
    folder: Path,
    world: World,
) -> tuple[Model, RunCard | None]:
    """The calibrated model, saved in `folder`, and the card with its score on the val split.

    The first policy of the options calibrates, all are scored; none: the model's own.
    """
    from swin_quant.checkpoint.class_names import names_of
    from swin_quant.cli.output import show_cards
    from swin_quant.data.sources import has_split
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.scoring import open_labelled
    from swin_quant.verbs.calibration_result import recalibrate
    from swin_quant.verbs.evaluate import score_model, scored_on

    named, replace_head = options.policy.policies(), options.replace_head
    policies = named or [unnamed_policy(cfg)]
    if len({tuple(rule.bits for rule in policy.rules if rule.bits) for policy in policies}) > 1:
        raise UsageError("‹policy›: ranges depend on the bits, so policies of different bits are calibrated one by one")
    wanted = not options.no_eval and cfg.MODEL.OUTPUT_KIND == LOGITS
    is_scored = wanted and has_split(cfg, "val")
    if is_scored:  # pictures without fitting labels are refused now, not after the calibration
        open_labelled(cfg, "val", world, "no", names_of(cfg, checkpoint, replace_head))
    if options.statistics:
        model = recalibrate(cfg, options.statistics, checkpoint, policies[0], plan.method, folder, world)
    else:
        model = calibrate_checkpoint(cfg, checkpoint, policies[0], plan, folder, world, replace_head)
    shared.tell_bits(policies)
    if not named:
        tell_unnamed(policies[0])
    if not is_scored:
        if wanted and (cfg.DATA.DATA_PATH or not options.statistics):  # statistics need no pictures
            log.warning("not scored: %s has no val split", cfg.DATA.DATA_PATH)
        return model, None
    file = model.checkpoint
    try:
        # A QAT checkpoint that is calibrated again is compared with its original.
        baseline = find_baseline(model.card, [file.resolve().parent], cfg, policies, world)
        pictures = scored_on(cfg, model, max_unreadable=plan.max_unreadable)
        score_model(model, pictures, policies, world, options.data.half, baseline)
    except SwinQuantError as error:
        raise SwinQuantError(f"the checkpoint is calibrated and saved, but scoring it failed: {error}") from error
    if world.is_main:
        model.card.write(file.with_suffix(".json"))
        show_cards([model.card])
    return model, model.card


def unnamed_policy(cfg: CfgNode | None) -> Policy:
    """The policy to calibrate under where nobody names one: that of the model's family, or for a wrapped module."""
    from swin_quant.quant.policy import load_policy

    return load_policy(families()[cfg.MODEL.TYPE].policy if cfg else WRAPPED)


def tell_unnamed(policy: Policy) -> None:
    """Say which policy is scored though nobody named it."""
    log.info(
        "policy %s, because none is named (%s): give the policy of your engine; `swin-quant policies` lists them",
        policy.name,
        policy.description.rstrip("."),
    )
