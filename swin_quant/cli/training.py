"""Options that the training commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.train.plot import FORMATS

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.cards.card import RunCard
    from swin_quant.quant.policy import Policy
    from swin_quant.tasks.train import Request
    from swin_quant.train.recipe import Recipe

CONSTANT, OF_CONFIG = "constant", "config"
# Options that only set a key of the recipe. An option that was not given leaves the key alone.
RECIPE_KEYS = {
    "epochs": "epochs",
    "batch": "batch_size",
    "accumulation_steps": "accumulation_steps",
    "lr": "optimizer.lr",
    "amp_opt_level": "precision",
    "distill_compat": "distill.compat",
    "distillation_loss_scale": "distill.weight",
    "temperature": "distill.temperature",
    "use_checkpoint": "memory.checkpointing",
    "freeze_stages": "freeze_stages",
    "compile": "compile",
    "amax": "amax.mode",
    "fsdp": "memory.fsdp",
    "offload": "memory.offload",
}


def add_training(parser: argparse.ArgumentParser, words: options.Words = {}) -> None:  # noqa: B006
    group = parser.add_argument_group("training")
    group.add_argument("--recipe", metavar="NAME|FILE", help="how to train: a shipped recipe or a YAML file")
    group.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="set keys of the recipe")
    group.add_argument(words.get("--epochs", "--epochs"), type=whole, dest="epochs", metavar="N", help="epochs")
    group.add_argument("--lr", type=float, metavar="LR", help="optimizer.lr")
    group.add_argument("--schedule", choices=("cosine", CONSTANT),
                       help="of the learning rate; constant: without warm-up, as FasterTransformer's")  # fmt: skip
    group.add_argument("--drop-path", metavar="RATE|config", help="augment.drop_path; config: MODEL.DROP_PATH_RATE")
    group.add_argument("--freeze-stages", type=whole, metavar="N",
                       help="the first N stages and what comes before them stay as they are")  # fmt: skip
    group.add_argument("--accumulation-steps", type=whole, metavar="N", help="batches a step of the optimizer")
    group.add_argument("--use-checkpoint", action="store_true", default=None, help="activation checkpointing")
    group.add_argument("--compile", action="store_true", default=None, help="torch.compile: faster after a slow start")
    group.add_argument("--amp-opt-level", choices=("O0", "O1", "O2", "O3"), help="precision of training")
    group.add_argument(
        "--fsdp", action="store_true", default=None, help="shard weights and optimizer over ranks (FSDP2)"
    )
    group.add_argument("--offload", action="store_true", default=None, help="with --fsdp: keep them on the CPU")
    group.add_argument("--continue", dest="go_on", action="store_true", help="go on with the run of the output folder")
    group.add_argument("--overwrite", action="store_true", help="replace the run that the output folder holds")
    group.add_argument("--tensorboard", action="store_true", help="log to TensorBoard too (extra `logs`)")
    group.add_argument("--plot", choices=FORMATS, help="form of the final plot (default png, where matplotlib is)")
    group.add_argument("--no-eval", action="store_true", help="do not score the result on the val split")


def recipe_of(args: argparse.Namespace, recipe: Recipe, **more: Any) -> Recipe:
    """`recipe`, then --set, then the options of their own."""
    pairs = [pair.partition("=") for pair in args.set]
    if bad := [key for key, sign, _ in pairs if not sign]:
        raise UsageError(f"--set takes KEY=VALUE, but got {bad[0]}")
    given = [(key, getattr(args, option, None)) for option, key in RECIPE_KEYS.items()]
    flags = {key: value for key, value in given if value is not None}
    if args.schedule:
        flags |= {"schedule.name": args.schedule} | ({"schedule.warmup_epochs": 0} if args.schedule == CONSTANT else {})
    if args.drop_path:
        flags["augment.drop_path"] = None if args.drop_path == OF_CONFIG else args.drop_path
    return recipe.having({key: value for key, _, value in pairs}, "--set").having(flags | more, "command line")


def request_of(args: argparse.Namespace, cfg: CfgNode, folder: Path) -> Request:
    """What the options ask for besides config and recipe."""
    from swin_quant.checkpoint.identify import config_given
    from swin_quant.tasks.train import Request

    teacher_cfg = config_given(args.teacher_cfg, args.teacher) if args.teacher_cfg else None
    return Request(
        folder=folder,
        start=args.checkpoint,
        teacher=args.teacher,
        teacher_cfg=teacher_cfg,
        resume=args.go_on,
        overwrite=args.overwrite,
        tensorboard=args.tensorboard,
        plot=args.plot,
        replace_head=args.replace_head,
        max_unreadable=args.max_unreadable,
        original=args.original,
    )


def add_qat(parser: argparse.ArgumentParser, words: options.Words = {}) -> None:  # noqa: B006
    group = parser.add_argument_group("QAT")
    group.add_argument("--distill", action="store_true", help="learn from a teacher (distill.weight 1 if it is 0)")
    group.add_argument("--teacher", metavar="FILE",
                       help="float checkpoint of the same classes to learn from (default: the original)")  # fmt: skip
    group.add_argument("--teacher-cfg", metavar="FILE", help="its configuration, if it is another model")
    group.add_argument(words.get("--distill-weight", "--distill-weight"), dest="distillation_loss_scale", type=float,
                       metavar="W", help="distill.weight")  # fmt: skip
    group.add_argument("--temperature", type=float, metavar="T", help="distill.temperature")
    group.add_argument("--distill-compat", choices=("none", "ft"), help="ft: FasterTransformer's loss, to the letter")
    group.add_argument("--amax", choices=("frozen", "learned", "reestimated"), help="amax.mode: what ranges do")


def qat_recipe_of(args: argparse.Namespace, recipe: Recipe) -> Recipe:
    """The recipe of `recipe_of`, and what --distill and --teacher mean for it."""
    recipe = recipe_of(args, recipe)
    if (args.distill and not recipe.distill.weight) or (args.teacher and not recipe.distill.on):
        return recipe.having({"distill.weight": 1.0}, "--distill")
    return recipe


def policy_of_card(card: RunCard) -> Policy:
    """The policy that a run card records."""
    from swin_quant.quant.policy import policy_from_dict

    return policy_from_dict(card.policy, "run card")
