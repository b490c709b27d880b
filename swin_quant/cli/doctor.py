"""swin-quant doctor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.cli import options
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "What this machine has: versions, engines and how to get the others, CPU and GPU; and what stands in the way."
EXAMPLES = """examples:
  swin-quant doctor
  swin-quant doctor --json machine.json                            (for a bug report)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.report.table import has_colors, json_text, print_text, screen_width
    from swin_quant.tasks.doctor import doctor

    if not world.is_main:
        return
    found = doctor()
    if args.json != "-":
        print_text(found.text(screen_width(80), has_colors()))
    if args.json:
        put(args.json, json_text(found.to_dict()))
