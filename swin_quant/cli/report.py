"""swin-quant report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cli import options
from swin_quant.cli.output import put
from swin_quant.report.formats import FORMATS, SUFFIXES

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "The accuracy-delta table of any number of run cards, as measured: for a terminal, Markdown, CSV or JSON."
EXAMPLES = """examples:
  swin-quant report out/swin_tiny_patch4_window7_224_calib.json
  swin-quant report out/mode1 out/mode2 --output docs/results         (all run cards directly in a directory)
  swin-quant report out/*/*_calib.json --format csv > table.csv"""
_NAME = "accuracy"  # of the files in --output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cards", nargs="+", metavar="RUN_CARD", help="run card, or directory of run cards")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="what is printed (default terminal)")
    files = ", ".join(f"{_NAME}{suffix}" for suffix in SUFFIXES)
    parser.add_argument("--output", metavar="DIR", help=f"also write {files} there")
    options.add_json(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.progress import log
    from swin_quant.report.accuracy.render import AccuracyTable
    from swin_quant.report.screen import print_text
    from swin_quant.tasks.report import is_card, read_cards

    if not world.is_main:
        return
    cards = read_cards(map(Path, args.cards))
    table = AccuracyTable.of(list(cards.values()))
    targets = {Path(args.output) / f"{_NAME}{suffix}": form for suffix, form in SUFFIXES.items()} if args.output else {}
    named = [*targets, *([Path(args.json)] if args.json not in (None, "-") else [])]
    if lost := [target for target in named if target.resolve() in cards or is_card(target)]:
        raise UsageError(f"{lost[0]}: is a run card, which the table would overwrite: choose another place")
    for target, form in targets.items():
        atomic_write_bytes(ensure_writable_dir(args.output) / target.name, table.text(form).encode())
        log.info("table: %s", target)
    if args.json != "-":
        table.show() if args.format == "terminal" else print_text(table.text(args.format))
    if args.json:
        put(args.json, table.text("json"))
