"""swin-quant sensitivity."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

KINDS = ("role", "stage", "block", "layer", "node")
PROFILE = "profile"
COUNT, TOP, BATCH = 64, 8, 16
HELP = "Measure what each node costs: the loss with only it quantized, and with all but it; nothing is changed."
EXAMPLES = """examples:
  swin-quant sensitivity out/my_calib.pth --data-path imagenet                          (policy of its run card)
  swin-quant sensitivity out/my_calib.pth --data-path data --policy qdq --kind layer --top 20
  swin-quant sensitivity out/my_calib.pth --data-path imagenet --format csv > costs.csv
  swin-quant sensitivity out/my_calib.pth --data-path imagenet --kind profile --format csv > depth.csv

The logits are compared with the float model's on unlabelled pictures, another draw than calibrate takes by the same
--seed, since ranges and weights were made to suit those. "off wins" is what SQNR gains by leaving a group
float: begin there where accuracy drops (--off, or `disable` in a policy)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "calibrated checkpoint", head=False)
    options.add_data(parser, half=False)
    parser.add_argument("--pictures", type=whole, default=COUNT, metavar="N", help=f"how many (default {COUNT})")
    parser.add_argument("--split", default="train", help="pictures to draw them from (default train)")
    options.add_policy(parser)
    parser.add_argument("--kind", nargs="+", choices=(*KINDS, PROFILE),
                        help="groups to show, or the SQNR of each block's output (default: all)")  # fmt: skip
    parser.add_argument("--top", type=whole, default=TOP, metavar="N",
                        help=f"rows of each kind, those that cost most; 0: all (default {TOP})")  # fmt: skip
    parser.add_argument("--format", default="table", choices=("table", "csv"), help="default table")
    options.add_json(parser)
    options.add_run(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.report import costs
    from swin_quant.report.table import json_text, print_table, print_text
    from swin_quant.tasks.sensitivity import Sampling, measure_checkpoint

    if not args.checkpoint:
        raise UsageError("nothing to measure: name a calibrated checkpoint")
    groups = [kind for kind in args.kind or KINDS if kind != PROFILE]
    if args.format == "csv" and groups and PROFILE in (args.kind or []):
        raise UsageError("--kind profile: CSV has one table: ask for it alone")
    cfg = options.config_of(args)
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: nodes are measured under one policy at a time")
    size = min(args.batch or BATCH, BATCH)  # more gains nothing, and what every block gave is kept in memory
    sampling = Sampling(args.pictures, args.split, cfg.SEED + 1, size, args.max_unreadable)
    _, record = measure_checkpoint(cfg, args.checkpoint, policies[0] if policies else None, sampling, world)
    if not world.is_main:
        return
    if args.json:
        put(args.json, json_text(record))
    if args.json == "-":
        return
    profile = bool(record["profile"]) if not args.kind else PROFILE in args.kind
    if args.format == "csv":
        print_text(costs.sensitivity_csv(record, groups) if groups else costs.profile_csv(record))
        return
    if groups:
        print_table(costs.sensitivity_table(record, groups, args.top or None))
    if groups and profile:
        print()
    if profile:
        print_table(costs.profile_table(record))
