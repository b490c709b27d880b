"""swin-quant calibrate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import output_dir, print_table
from swin_quant.config.outputs import LOGITS

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard
    from swin_quant.tasks.calibrate import CalibrationPlan

HELP = "Calibrate a float checkpoint on pictures: writes <NAME>_calib.pth and its run card, then scores them."
EXAMPLES = """examples:
  swin-quant calibrate swin_tiny_patch4_window7_224.pth --data-path imagenet --policy ft-mode1 --output out
  swin-quant calibrate timm:resnet50 --data-path imagenet --policy cpu --output out    (any model of timm)
  swin-quant calibrate my.pth --cfg my.yaml --data-path data --calibrator mse --pictures 160
  torchrun --nproc_per_node 4 calibrate.py my.pth --data-path data --split val --no-eval
  swin-quant calibrate --statistics out/my_calib.stats.npz --policy qdq --aprec 4 --output out4 --no-eval
                                                         (in what an earlier one counted: no pictures are read)"""
_OF_PICTURES = ("pictures", "calib_split", "calib_augment", "exact_histogram", "passes", "no_equalize", "replace_head",
                "random_weights")  # fmt: skip
_PICTURES, _BATCH = 80, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "float checkpoint: Microsoft's, timm's, Hugging Face's, ours")
    options.add_output_kind(parser)
    options.add_data(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument("--pictures", type=whole, metavar="N", help=f"how many calibrate (default {_PICTURES})")
    group.add_argument("--split", dest="calib_split", metavar="SPLIT", help="pictures to sample (default train)")
    group.add_argument("--augment", dest="calib_augment", action="store_true", help="augmented training crops")
    options.add_calibrator(parser)
    options.add_passes(parser)
    options.add_policy(parser)
    options.add_run(parser)
    options.add_output(parser)
    parser.add_argument("--no-eval", action="store_true", help="do not score the result on the val split")
    parser.add_argument(
        "--statistics", metavar="FILE", help="search ranges anew in what a calibration left: *.stats.npz"
    )
    parser.add_argument("--random-weights", action="store_true", help="without a checkpoint: time untrained weights")


def plan_of(args: argparse.Namespace, seed: int) -> CalibrationPlan:
    """The calibration that the options describe: ranges do not depend on the batch, so it may be any that divides."""
    from swin_quant.tasks.calibrate import CalibrationPlan

    if sample := getattr(args, "sample", None):  # main.py's batches and their size
        batches, size = sample
    else:
        count, most = _PICTURES if args.pictures is None else args.pictures, min(args.batch or _BATCH, _BATCH)
        if count < 1:
            raise UsageError(f"--pictures {count}: must be at least 1")
        size = next(size for size in range(max(most, 1), 0, -1) if count % size == 0)
        batches = count // size
    split, method = args.calib_split or "train", options.method_of(args)
    passes = options.passes_of(args)
    return CalibrationPlan(batches, size, split, seed, args.calib_augment, method, args.max_unreadable, passes)


def run(args: argparse.Namespace, world: World) -> RunCard | None:
    """Returns the card of what was scored, None if nothing was."""
    from swin_quant.base.progress import log
    from swin_quant.checkpoint.class_names import names_of
    from swin_quant.data.sources import has_split
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.scoring import open_labelled
    from swin_quant.tasks.calibrate import calibrate_checkpoint, tell_unnamed, unnamed_policy
    from swin_quant.tasks.evaluate import score_model
    from swin_quant.tasks.recalibrate import calibrated_beside, recalibrate

    statistics = getattr(args, "statistics", None)  # main.py has no such option
    if not args.checkpoint and not args.random_weights and not statistics:
        raise UsageError("no checkpoint: name one (or --random-weights to time an untrained model)")
    if statistics and (idle := [name for name in _OF_PICTURES if getattr(args, name)]):
        flag = idle[0].removeprefix("calib_").replace("_", "-")
        raise UsageError(f"--{flag}: the pictures are those of --statistics: leave it out")
    if statistics and not args.checkpoint and not args.cfg:
        args.checkpoint = str(calibrated_beside(statistics))
    cfg = options.config_of(args)
    asked = options.policies_of(args)
    policies = asked or [unnamed_policy(cfg)]
    if len({tuple(rule.bits for rule in policy.rules if rule.bits) for policy in policies}) > 1:
        raise UsageError("--policy: ranges depend on the bits, so policies of different bits are calibrated one by one")
    plan = plan_of(args, cfg.SEED)
    directory = getattr(args, "calib_output_path", None) or output_dir(args, cfg)
    scored = not args.no_eval and cfg.MODEL.OUTPUT_KIND == LOGITS and has_split(cfg, "val")
    if scored:
        named = names_of(cfg, args.checkpoint, args.replace_head)
        open_labelled(cfg, "val", world, "no", named)  # refused now, not after the calibration
    if statistics:
        done = recalibrate(cfg, statistics, args.checkpoint, policies[0], plan.method, directory, world)
    else:
        done = calibrate_checkpoint(cfg, args.checkpoint, policies[0], plan, directory, world, args.replace_head)
    args.made = str(done.checkpoint)  # for main.py, which goes on with it
    options.tell_bits(policies)
    if not asked:
        tell_unnamed(policies[0])
    if not scored:
        if (
            not args.no_eval and cfg.MODEL.OUTPUT_KIND == LOGITS and (cfg.DATA.DATA_PATH or not statistics)
        ):  # which need no pictures
            log.warning("not scored: %s has no val split", cfg.DATA.DATA_PATH)
        return None
    try:
        folders = [done.checkpoint.resolve().parent]
        baseline = find_baseline(done.card, folders, cfg, policies, world)  # of QAT that is calibrated again
        how = (policies, world, "val", args.half, args.max_unreadable, baseline)
        card = score_model(done.model, cfg, done.card, *how)
    except SwinQuantError as error:
        raise SwinQuantError(f"the checkpoint is calibrated and saved, but scoring it failed: {error}") from error
    if world.is_main:
        card.write(done.checkpoint.with_suffix(".json"))
        print_table([card])
    return card
