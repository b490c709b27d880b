"""swin-quant report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put
from swin_quant.report import FORMATS, SUFFIXES

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "The accuracy-delta table of any number of run cards, as measured: for a terminal, Markdown, CSV, JSON, a page."
EXAMPLES = """examples:
  swin-quant report out/swin_tiny_patch4_window7_224_calib.json
  swin-quant report out/mode1 out/mode2 --output docs/results         (all run cards directly in a directory)
  swin-quant report out/*/*_calib.json --format csv > table.csv
  swin-quant report out --columns name policy quantized_acc1 delta_acc1 agreement quantized_ms
  swin-quant report out --html report.html                            (a page: one file, which fetches nothing)
  swin-quant report out --html report.html --data-path data           (and pictures that INT8 sees otherwise)"""
_NAME = "accuracy"  # of the files in --output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cards", nargs="+", metavar="RUN_CARD", help="run card, or directory of run cards")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="what is printed (default terminal)")
    parser.add_argument("--columns", nargs="+", metavar="KEY", default=(),
                        help="these, as CSV calls them, in this order; all: every one, in Markdown, too")  # fmt: skip
    files = ", ".join(f"{_NAME}{suffix}" for suffix in SUFFIXES)
    parser.add_argument("--output", metavar="DIR", help=f"also write {files} there")
    parser.add_argument("--html", metavar="FILE", help="also write the page there: one file, which needs no network")
    pictures = parser.add_argument_group("pictures for the page, that float and quantized name differently")
    pictures.add_argument("--data-path", metavar="DIR", help="folder with the split, or its zip; or: digits")
    pictures.add_argument("--zip", action="store_true", help="the zip of the split, even where a folder lies beside it")
    pictures.add_argument("--split", default="val", help="which split of the data (default val)")
    pictures.add_argument("--pictures", type=whole, default=256, metavar="N", help="how many (default 256)")
    options.add_json(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.progress import log
    from swin_quant.report.accuracy.render import AccuracyTable
    from swin_quant.report.table import print_text
    from swin_quant.tasks.report import is_card, read_cards, with_results

    if not world.is_main:
        return
    read = read_cards(map(Path, args.cards))
    cards = with_results(read)
    if args.data_path and not args.html:
        raise UsageError("--data-path: is for the page: add --html FILE")
    if args.pictures < 1:
        raise UsageError(f"--pictures {args.pictures}: must be at least 1")
    table = AccuracyTable.of(list(cards.values()), args.columns)
    targets = {Path(args.output) / f"{_NAME}{suffix}": form for suffix, form in SUFFIXES.items()} if args.output else {}
    named = [*targets, *(Path(file) for file in (args.html, args.json) if file not in (None, "-"))]
    if lost := [target for target in named if target.resolve() in {path.resolve() for path in read} or is_card(target)]:
        raise UsageError(f"{lost[0]}: is a run card, which the table would overwrite: choose another place")
    narrow = table if args.columns else table.short()  # Markdown does not fold: a table of all columns is unreadable

    def text(form: str) -> str:
        return (narrow if form == "markdown" else table).text(form)

    for target, form in targets.items():
        atomic_write_bytes(ensure_writable_dir(args.output) / target.name, text(form).encode())
        log.info("table: %s", target)
    if args.html:
        from swin_quant.tasks.page import pictures_at, write_page

        opened = pictures_at(args.data_path, args.split, args.zip) if args.data_path else None
        write_page(Path(args.html), read, opened, args.pictures)
    if args.json != "-":
        table.show() if args.format == "terminal" else print_text(text(args.format))
    if args.json:
        put(args.json, table.text("json"))
