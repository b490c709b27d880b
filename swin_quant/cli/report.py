"""swin-quant report."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, read_json
from swin_quant.cli import options
from swin_quant.cli.output import put
from swin_quant.report.formats import FORMATS, SUFFIXES

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.cards.card import RunCard

HELP = "The accuracy-delta table of any number of run cards, as measured: for a terminal, Markdown, CSV or JSON."
EXAMPLES = """examples:
  swin-quant report out/swin_tiny_patch4_window7_224_calib.json
  swin-quant report out/mode1 out/mode2 --output docs/results         (all run cards directly in a directory)
  swin-quant report out/*/*_calib.json --format csv > table.csv"""
_NO_RESULT = "no result: run `swin-quant evaluate`"
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

    if not world.is_main:
        return
    cards = _read_cards(map(Path, args.cards))
    table = AccuracyTable.of(list(cards.values()))
    targets = {Path(args.output) / f"{_NAME}{suffix}": form for suffix, form in SUFFIXES.items()} if args.output else {}
    named = [*targets, *([Path(args.json)] if args.json not in (None, "-") else [])]
    if lost := [target for target in named if target.resolve() in cards or _is_card(target)]:
        raise UsageError(f"{lost[0]}: is a run card, which the table would overwrite: choose another place")
    for target, form in targets.items():
        atomic_write_bytes(ensure_writable_dir(args.output) / target.name, table.text(form).encode())
        log.info("table: %s", target)
    if args.json != "-":
        table.show() if args.format == "terminal" else print_text(table.text(args.format))
    if args.json:
        put(args.json, table.text("json"))


def _read_cards(paths: Iterable[Path]) -> dict[Path, RunCard]:
    """The cards with results, by file; those without are left out, with a warning that names them."""
    from swin_quant.base.progress import log
    from swin_quant.cards.card import RunCard

    cards: dict[Path, RunCard] = {}
    empty: list[str] = []
    for path in paths:
        for file in _cards_in(path) if path.is_dir() else (path,):
            card = RunCard.read(file)
            if card.results:
                cards[file.resolve()] = card
            else:
                empty.append(str(file))
    if not cards:
        raise SwinQuantError(f"{listed(empty)}: {_NO_RESULT}")
    if empty:
        log.warning("left out: %s: %s", listed(empty), _NO_RESULT)
    return cards


def _cards_in(directory: Path) -> Iterator[Path]:
    found = [file for file in sorted(directory.glob("*.json")) if _is_card(file)]
    if not found:
        raise SwinQuantError(f"{directory}: no run card (*.json) in this directory")
    yield from found


def _is_card(file: Path) -> bool:
    """Whether a file calls itself a run card, of whatever version."""
    from swin_quant.cards.card import FAMILY

    try:
        content = read_json(file, "run card")
    except SwinQuantError:
        return False
    schema = content.get("schema") if isinstance(content, dict) else None
    return isinstance(schema, str) and schema.startswith(FAMILY)
