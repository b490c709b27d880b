"""The accuracy-delta table of any number of run cards, as measured: for a terminal, Markdown, CSV, JSON, a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, read_json
from swin_quant.base.progress import log
from swin_quant.cards.card import FAMILY, RunCard
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.report import FORMATS, SUFFIXES
from swin_quant.report.table import print_text

EXAMPLES = """examples:
  swin-quant report out/swin_tiny_patch4_window7_224_calib.json
  swin-quant report out/mode1 out/mode2 --output docs/results         (all run cards directly in a directory)
  swin-quant report out/*/*_calib.json --format csv > table.csv
  swin-quant report out --columns name policy quantized_acc1 delta_acc1 agreement quantized_ms
  swin-quant report out --html report.html                            (a page: one file, which fetches nothing)
  swin-quant report out --html report.html --data-path data           (and pictures that INT8 classifies differently)"""
_NAME = "accuracy"  # first part of the names of files in --output
_FILES = ", ".join(f"{_NAME}{suffix}" for suffix in SUFFIXES)
_NO_RESULT = "no result: run `swin-quant evaluate`"


@dataclass(frozen=True)
class PageOptions(shared.SplitOptions):
    """Pictures for the page."""

    TITLE = "pictures for the page: those that float and INT8 classify differently are shown"
    pictures: Annotated[int, Flag("how many", "N", least=1)] = 256


@dataclass(frozen=True)
class ReportOptions:
    """The cards of the report, and the forms and places that it is written in."""

    cards: Annotated[tuple[str, ...], Flag("run card, or directory of run cards", "RUN_CARD", place=True)]
    format: Annotated[str, Flag("form that is printed (default terminal)", choices=FORMATS)] = "terminal"
    columns: Annotated[
        tuple[str, ...],
        Flag("these, as CSV calls them, in this order; all: every one, in Markdown, too", "KEY"),
    ] = ()
    output: Annotated[str | None, Flag(f"also write {_FILES} there", "DIR")] = None
    html: Annotated[str | None, Flag("also write the page there: one file, which needs no network", "FILE")] = None
    page: PageOptions = PageOptions()
    json: shared.Json = None


def run(options: ReportOptions) -> None:
    from swin_quant.report.accuracy import AccuracyTable

    read = read_cards(map(Path, options.cards))
    cards = with_results(read)
    if options.page.data_path and not options.html:
        raise UsageError("--data-path: is for the page: add --html FILE")
    if options.html:  # a missing library is named before pictures are classified
        library("vl_convert", "report")
        ensure_writable_dir(Path(options.html).parent)
    table = AccuracyTable.of(list(cards.values()), options.columns)
    targets = (
        {Path(options.output) / f"{_NAME}{suffix}": form for suffix, form in SUFFIXES.items()} if options.output else {}
    )
    named = [*targets, *(Path(file) for file in (options.html, options.json) if file not in (None, "-"))]
    if lost := [target for target in named if target.resolve() in {path.resolve() for path in read} or is_card(target)]:
        raise UsageError(f"{lost[0]}: is a run card, which the table would overwrite: choose another place")
    for target, form in targets.items():
        atomic_write_bytes(ensure_writable_dir(target.parent) / target.name, table.text(form).encode())
        log.info("table: %s", target)
    if options.html:
        from swin_quant.data.picture_set import PictureSet
        from swin_quant.verbs.report_page import write_page

        place = options.page
        pictures = PictureSet(place.data_path, place.split, zip_mode=place.zip) if place.data_path else None
        write_page(Path(options.html), read, pictures, place.pictures)
    is_plain = options.format == "terminal"
    tell(options.json, table.show if is_plain else lambda: print_text(table.text(options.format)), table.as_data())


def with_results(cards: Mapping[Path, RunCard]) -> dict[Path, RunCard]:
    """The cards with results; a warning names the cards without."""
    empty = [str(path) for path, card in cards.items() if not card.results]
    if len(empty) == len(cards):
        raise SwinQuantError(f"{listed(empty)}: {_NO_RESULT}")
    if empty:
        log.warning("left out: %s: %s", listed(empty), _NO_RESULT)
    return {path: card for path, card in cards.items() if card.results}


def read_cards(paths: Iterable[Path]) -> dict[Path, RunCard]:
    """The cards by file, as they are named. Beside a card, JSON of another kind, as `*.json` finds it, is left out."""
    files = list(dict.fromkeys(file for path in paths for file in (_cards_in(path) if path.is_dir() else (path,))))
    others = [file for file in files if _schema(file) == ""]
    if 0 < len(others) < len(files):
        log.warning("left out: %s: no run card", listed(map(str, others)))
        files = [file for file in files if file not in others]
    return {file: RunCard.read(file) for file in files}


def _cards_in(directory: Path) -> Iterator[Path]:
    found = [file for file in sorted(directory.glob("*.json")) if is_card(file)]
    if not found:
        raise SwinQuantError(f"{directory}: no run card (*.json) in this directory")
    yield from found


def is_card(file: Path) -> bool:
    """Whether a file calls itself a run card, of whatever version."""
    return bool(_schema(file))


def _schema(file: Path) -> str | None:
    """The version of run cards that a file names; "" for JSON of another kind, None for what is no JSON."""
    try:
        content = read_json(file, "run card")
    except SwinQuantError:
        return None
    schema = content.get("schema") if isinstance(content, dict) else None
    return schema if isinstance(schema, str) and schema.startswith(FAMILY) else ""
