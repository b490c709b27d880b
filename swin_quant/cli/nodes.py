"""swin-quant nodes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "List every quantizer node of a model: state, bits, granularity, range, shape."
EXAMPLES = """examples:
  swin-quant nodes --cfg swin_tiny_patch4_window7_224 --policy ft-mode2
  swin-quant nodes out/my_calib.pth                                                     (policy of its run card)
  swin-quant nodes out/my_calib.pth --policy qdq --format csv > nodes.csv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "calibrated checkpoint, to see its ranges", head=False)
    options.add_policy(parser)
    parser.add_argument("--format", default="table", choices=("table", "csv"), help="default table")
    options.add_json(parser)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=argparse.SUPPRESS)
    parser.set_defaults(data_path=None)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.report import nodes
    from swin_quant.report.table import print_table, print_text
    from swin_quant.tasks.nodes import nodes_of

    cfg = options.config_of(args)
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: nodes are listed under one policy at a time")
    rows = nodes_of(cfg, args.checkpoint, policies[0] if policies else None)
    if not world.is_main:
        return
    if args.json:
        put(args.json, nodes.as_json(rows))
    if args.json == "-":
        return
    if args.format == "csv":
        print_text(nodes.as_csv(rows))
    else:
        print_table(nodes.table_of(rows))
