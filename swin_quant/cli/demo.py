"""swin-quant demo."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import print_table

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EPOCHS = 6
HELP = "Train a micro Swin on digits, calibrate it, train it at 4 bits, score all on the engines. Offline, under 90 s."
EXAMPLES = """examples:
  swin-quant demo
  swin-quant demo --model swinv2_digits --output out/demo2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="out/demo", metavar="DIR", help="default out/demo")
    parser.add_argument("--model", default="swin_digits", choices=("swin_digits", "swinv2_digits"))
    parser.add_argument("--epochs", type=whole, default=EPOCHS, metavar="N", help=f"default {EPOCHS}")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.tasks.demo import run_demo

    if args.epochs < 1:
        raise UsageError(f"--epochs {args.epochs}: must be at least 1")
    if world.size > 1:
        raise UsageError("the demo runs in one process: start it without torchrun")
    print_table(run_demo(args.output, args.model, args.epochs, world))
