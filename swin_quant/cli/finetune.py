"""swin-quant finetune."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options, training
from swin_quant.cli.output import output_dir, print_table

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard
    from swin_quant.quant.policy import Policy
    from swin_quant.tasks.train import Trained

HELP = "QAT: fine-tune a calibrated checkpoint with its nodes on: writes <NAME>_qat.pth, its run card, logs; scores it."
EXAMPLES = """examples:
  swin-quant finetune out/my_calib.pth --data-path imagenet --recipe qat_tiny --distill
                                                                                        (policy of its run card)
  swin-quant finetune out/my_calib.pth --data-path data --recipe micro_w4a4 --policy ft-mode1 \\
      --wprec 4 --aprec 4 --teacher my.pth
  torchrun --nproc_per_node 4 qat_finetune.py ... --continue                             (goes on where it stopped)"""
DEFAULT_RECIPE = "qat_tiny"


def _print_features(args: argparse.Namespace, cfg: CfgNode, trained: Trained, policy: Policy, world: World) -> None:
    from swin_quant.data.sources import has_split
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.features import score_features

    if args.no_eval or world.size > 1 or not has_split(cfg, "val"):
        return
    baseline = find_baseline(trained.card, [trained.checkpoint.resolve().parent], cfg, [policy], world, args.original)
    how = (world, "val", args.half, args.max_unreadable, baseline)
    for score in score_features(trained.model, cfg, trained.card, [policy], *how):
        print(score)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "calibrated checkpoint")
    options.add_data(parser)
    options.add_policy(parser)
    training.add_training(parser)
    training.add_qat(parser)
    options.add_original(parser)
    options.add_run(parser)
    options.add_output(parser)


def run(args: argparse.Namespace, world: World) -> RunCard | None:
    """Returns the card of what was scored, None if nothing was."""
    from swin_quant.config.outputs import LOGITS
    from swin_quant.score.baseline import find_baseline
    from swin_quant.score.scoring import score_model
    from swin_quant.tasks.finetune import finetune
    from swin_quant.tasks.train import plot
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.recipe import load_recipe

    cfg = options.config_of(args)
    recipe = training.qat_recipe_of(args, load_recipe(args.recipe or DEFAULT_RECIPE))
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: fine-tuning is for one policy at a time")
    with only_writer(output_dir(args, cfg), world):  # until the last result is in the run card
        request = training.request_of(args, cfg, output_dir(args, cfg))
        trained = finetune(cfg, recipe, request, policies, world)
        policy = training.policy_of_card(trained.card)
        options.tell_bits([policy])
        if cfg.MODEL.OUTPUT_KIND != LOGITS:
            _print_features(args, cfg, trained, policy, world)
            return None
        if args.no_eval or trained.position.best_epoch is None:
            return None
        folders = [trained.checkpoint.resolve().parent]
        baseline = find_baseline(trained.card, folders, cfg, [policy], world, args.original)
        scored = (trained.card, [policy], world, "val", args.half, args.max_unreadable, baseline)
        card = score_model(trained.model, cfg, *scored)
        if world.is_main:
            card.write(trained.checkpoint.with_suffix(".json"))
            plot(request, cfg.MODEL.NAME, card.measured())
            print_table([card])
    return card
