"""swin-quant train."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.cli import options, training
from swin_quant.cli.output import output_dir, print_table

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Train a float model, from scratch or from weights: writes <NAME>.pth, its run card and logs, then scores it."
EXAMPLES = """examples:
  swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out
  swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out --continue
  torchrun --nproc_per_node 8 -m swin_quant train --cfg swin_tiny_patch4_window7_224 --data-path imagenet"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "weights to start from (default: from scratch)")
    options.add_data(parser)
    training.add_training(parser)
    options.add_run(parser)
    options.add_output(parser)
    parser.set_defaults(teacher=None, teacher_cfg=None, original=None)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.score.scoring import score_model
    from swin_quant.tasks.train import train_float
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.recipe import load_recipe, recipe_of_config

    cfg = options.config_of(args)
    recipe = training.recipe_of(args, load_recipe(args.recipe) if args.recipe else recipe_of_config(cfg))
    with only_writer(output_dir(args, cfg), world):  # until the last result is in the run card
        trained = train_float(cfg, recipe, training.request_of(args, cfg, output_dir(args, cfg)), world)
        if args.no_eval or trained.position.best_epoch is None:
            return
        card = score_model(trained.model, cfg, trained.card, (), world, "val", args.half, args.max_unreadable)
        if world.is_main:
            card.write(trained.checkpoint.with_suffix(".json"))
            print_table([card])
