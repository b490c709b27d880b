"""swin-quant calibrate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import options
from swin_quant.cli.output import output_dir, print_table

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard

HELP = "Calibrate a float checkpoint on pictures: writes <NAME>_calib.pth and its run card, then scores them."
EXAMPLES = """examples:
  swin-quant calibrate --cfg swin_tiny_patch4_window7_224 --resume swin_tiny_patch4_window7_224.pth \\
      --data-path imagenet --int8-mode 1
  torchrun --nproc_per_node 4 calibrate.py --cfg my.yaml --resume my.pth --data-path data --zip --calibrator mse
  swin-quant calibrate --cfg my.yaml --resume my.pth --data-path pictures --calib-split val --no-eval
  swin-quant calibrate --cfg my.yaml --statistics out/my_calib.stats.npz --calibrator mse --int8-mode 1 --aprec 4 \\
      --calib-output-path out4 --no-eval                       (in what an earlier one counted: no pictures are read)"""
_OF_PICTURES = ("num_calib_batch", "calib_batchsz", "calib_split", "calib_augment", "exact_histogram", "replace_head",
                "random_weights")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_data(parser)
    options.add_calibration(parser, batches=10)
    options.add_policy(parser)
    options.add_run(parser)
    parser.add_argument("--no-eval", action="store_true", help="do not score the result on the val split")
    parser.add_argument(
        "--statistics", metavar="FILE", help="search ranges anew in what a calibration left: *.stats.npz"
    )
    parser.add_argument("--random-weights", action="store_true", help="without --resume: time on untrained weights")


def run(args: argparse.Namespace, world: World) -> RunCard | None:
    """Returns the card of what was scored, None if nothing was."""
    from swin_quant.base.progress import log
    from swin_quant.data.sources import has_split
    from swin_quant.engines.baseline import find_baseline
    from swin_quant.engines.scoring import open_labelled
    from swin_quant.quant.policies import load_policy
    from swin_quant.tasks.calibrate import calibrate_checkpoint
    from swin_quant.tasks.evaluate import score_model
    from swin_quant.tasks.recalibrate import recalibrate

    statistics = getattr(args, "statistics", None)  # main.py has no such option
    if not args.resume and not args.random_weights and not statistics:
        raise UsageError("no checkpoint: give --resume FILE (or --random-weights to time an untrained model)")
    if statistics and (idle := [name for name in _OF_PICTURES if getattr(args, name)]):
        raise UsageError(f"--{idle[0].replace('_', '-')}: the pictures are those of --statistics: leave it out")
    cfg = options.config_of(args)
    policies = options.policies_of(args) or [load_policy("ft-mode1")]
    if len({tuple(rule.bits for rule in policy.rules if rule.bits) for policy in policies}) > 1:
        raise UsageError("--policy: ranges depend on the bits, so policies of different bits are calibrated one by one")
    plan = options.plan_of(args, cfg.SEED)
    directory = args.calib_output_path or output_dir(cfg)
    scored = not args.no_eval and has_split(cfg, "val")
    if scored:
        open_labelled(cfg, "val", world, cache_mode="no")  # refused now, not after the calibration
    if statistics:
        done = recalibrate(cfg, statistics, args.resume, policies[0], plan.method, directory, world)
    else:
        done = calibrate_checkpoint(cfg, args.resume, policies[0], plan, directory, world, args.replace_head)
    options.tell_bits(policies)
    if not scored:
        if not args.no_eval and (cfg.DATA.DATA_PATH or not statistics):  # which need no pictures
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
