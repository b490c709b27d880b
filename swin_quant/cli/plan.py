"""swin-quant plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "What the CUDA engine can at best give on a GPU: bytes, operations and least time of each launch. No GPU needed."
MODEL = "swin_tiny_patch4_window7_224"
EXAMPLES = """examples:
  swin-quant plan --gpu h200 --batch 32                                            (Swin-T, if no other is given)
  swin-quant plan my.pth --gpu h200 --batch 32
  swin-quant plan --cfg swin_tiny_patch4_window7_224 --gpu a100 --json plan.json   (shapes alone need no weights)
  swin-quant plan --cfg swin_tiny_patch4_window7_224 --gpu l4 --output out         (plan.md, plan.csv, plan.json)

Planned, not measured: the launches are those that the engine executes, their times the least that the peaks of a GPU's
data sheet allow. INT8 stands beside FP16 and, where the GPU has it, FP8; below it, what fusing launches would save."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "a Swin, float or calibrated, or timm:NAME, hf:NAME", head=False)
    parser.add_argument("--gpu", default="h200", metavar="NAME|FILE",
                        help="a100, l4, rtx4090, h100, h200, b200, ... or a YAML file (default h200)")  # fmt: skip
    parser.add_argument("--batch", type=whole, default=32, metavar="N", help="pictures at a time (default 32)")
    parser.add_argument("--output", metavar="DIR", help="also write plan.md, plan.csv and plan.json there")
    options.add_json(parser)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
    from swin_quant.base.progress import log
    from swin_quant.report.plan import FILES, plan_text
    from swin_quant.report.table import NARROW, has_colors, json_text, print_text, screen_width
    from swin_quant.tasks.plan import plan

    if world.size > 1:
        raise UsageError("plan runs in one process: start it without torchrun")
    if not args.checkpoint:
        args.cfg = args.cfg or MODEL
    cfg = options.config_of(args, {"checkpoint": options.CONFIG_KEYS["checkpoint"]})
    found = plan(cfg, args.gpu, args.batch)
    if args.output:
        folder = ensure_writable_dir(args.output)
        for name, write in FILES.items():
            atomic_write_bytes(folder / name, write(found).encode())
            log.info("plan: %s", folder / name)
    if args.json != "-":
        print_text(plan_text(found, screen_width(NARROW), has_colors()))
    if args.json:
        put(args.json, json_text(found.to_dict()))
