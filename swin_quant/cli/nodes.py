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
    import torch

    from swin_quant.cards.lineage import card_of
    from swin_quant.checkpoint import load_calibrated
    from swin_quant.config import architecture
    from swin_quant.models import build_model
    from swin_quant.quant.listing import list_nodes
    from swin_quant.quant.policy import apply_policy, policy_from_dict
    from swin_quant.report import nodes
    from swin_quant.report.screen import print_table, print_text

    cfg = options.config_of(args)
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: nodes are listed under one policy at a time")
    with torch.device("cpu" if args.checkpoint else "meta"):  # shapes and names need no weights
        model = build_model(cfg)
    card = card_of(args.checkpoint) if args.checkpoint else None
    if card and card.policy and not policies:
        policies = [policy_from_dict(card.policy, card.name)]
    for policy in policies:
        apply_policy(model, policy)
    if args.checkpoint:
        load_calibrated(model, args.checkpoint)
    rows = list_nodes(model, (1, architecture(cfg).IN_CHANS, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE))
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
