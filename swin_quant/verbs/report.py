"""The accuracy-delta table of any number of run cards, as measured: on the terminal, in files, and as a page."""

import os
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Annotated

from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, is_card, schema_in, with_results
from swin_quant.cards.paths import card_path
from swin_quant.data.picture_set import PictureSet, Source, resolve_source
from swin_quant.report import SUFFIXES
from swin_quant.report.accuracy import AccuracyTable
from swin_quant.report.verdict import best_first, card_verdict, has_classes
from swin_quant.verbs.report_page import write_page

EXAMPLES = """swin-quant report out/swin_tiny_patch4_window7_224_calib.json
swin-quant report out/mode1 out/mode2 --output docs/results
swin-quant report out --html report.html --data-path data"""
_NAME = "accuracy"  # first part of the names of files in --output
_NO_RESULT = "no result: run `swin-quant evaluate`"
_MOST_VERDICTS = 8  # more are for the page
_MOST_FILES = 1000  # JSON files in and below a folder
_WITHOUT = ("seed", "cache_mode")


def report(
    cards: tuple[str | Path, ...],
    *,
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    html: str | Path | None = None,
    pictures: Annotated[
        Source | None, Fields(PictureSet, "pictures for the page: those that INT8 classifies differently", (), _WITHOUT)
    ] = None,
) -> AccuracyTable:
    """Print the accuracy-delta table of run cards, as measured; write it, and a page with all that they hold.

    Args:
        cards: run cards, or folders with run cards in them or below
        folder: also write accuracy.md, accuracy.csv and accuracy.json there
        html: also write the page there: one file, which needs no network
        pictures: Pictures of which 256 are compared for the page, evenly spread; they need no labels.

    Returns:
        The table.

    Raises:
        SwinQuantError: No card has a result, or one is damaged.
        UsageError: A file would replace a run card.
    """
    read = read_cards(map(Path, [cards] if isinstance(cards, str | Path) else cards))
    empty = [str(path) for path, card in read.items() if not card.results]
    if len(empty) == len(read):
        why = _NO_RESULT if any(map(has_classes, read.values())) else "no classes, whose accuracy could be reported"
        raise SwinQuantError(f"{listed(empty)}: {why}")
    scored = {card.weights_sha256 for card in read.values() if card.results} - {None}  # or artifacts of it were
    if unscored := [path for path in empty if read[Path(path)].weights_sha256 not in scored]:
        log.warning("left out: %s: %s", listed(unscored), _NO_RESULT)
    if pictures is not None and not html:
        raise UsageError("‹data_path›: is for the page: add ‹html› FILE")
    if html:  # a missing library is named before pictures are classified
        library("vl_convert", "report")
        ensure_writable_dir(Path(html).parent)
    table = AccuracyTable.from_cards([card for card in read.values() if card.results])
    targets = {Path(folder) / f"{_NAME}{suffix}": form for suffix, form in SUFFIXES.items()} if folder else {}
    for target in [*targets, *([Path(html)] if html else [])]:
        if is_card(target):
            raise UsageError(f"{target}: is a run card, which the table would overwrite: choose another place")
    for target, form in targets.items():
        atomic_write_bytes(ensure_writable_dir(target.parent) / target.name, table.text(form).encode())
        log.info("table: %s", target)
    if html:
        source = None if pictures is None else resolve_source(pictures)
        if source is not None and not isinstance(source, PictureSet):
            raise UsageError("pictures: the page shows them: give a place on disk")
        write_page(Path(html), read, source)
    verdicts = best_first(filter(None, (card_verdict(card, path, Path()) for path, card in read.items())))
    for verdict in verdicts[:_MOST_VERDICTS]:
        log.info("deploy %s: %s", verdict.choice, verdict.summary)
    if more := len(verdicts[_MOST_VERDICTS:]):
        log.info("%d more are on the page (‹html›)", more)
    return table


def read_cards(paths: Iterable[Path]) -> dict[Path, RunCard]:
    """The cards by file, as they are named; one that is found twice counts once, and so do copies of an artifact.

    A folder stands for the cards in it and below it. JSON of another kind beside them, as `*.json` finds it, is left
    out, and so are hidden folders. SwinQuantError for a folder without a card, or with too many files.
    """
    found: dict[Path, Path] = {}  # by their real paths
    for path in paths:
        named: dict[Path, str | None] = {} if path.is_dir() else {path: ""}
        for folder, below, names in os.walk(path) if path.is_dir() else ():
            below[:] = sorted(name for name in below if not name.startswith("."))
            files = [Path(folder, name) for name in sorted(names) if name.endswith(".json")]
            if len(named) + len(files) > _MOST_FILES:
                raise SwinQuantError(
                    f"{path}: more than {_MOST_FILES} JSON files: give the folders that hold the cards"
                )
            named |= {file: schema_in(file) for file in files}
        if broken := [str(file) for file, schema in named.items() if schema is None]:
            log.warning("left out: %s: its JSON cannot be read", listed(broken))
        inside = [file for file, schema in named.items() if schema or not path.is_dir()]
        if not inside:
            raise SwinQuantError(f"{path}: no run card (*.json) in this directory or below")
        for file in inside:
            found.setdefault(file.resolve(), file)
    files = list(found.values())
    for file in files:
        if file.suffix != ".json" and file.is_file() and not is_card(file):
            beside = card_path(file)
            remedy = f"{beside}, or its folder" if beside.is_file() else "one (*.json), or a folder of them"
            raise UsageError(f"{file}: is no run card: give {remedy}")
    others = [file for file in files if schema_in(file) == ""]
    if 0 < len(others) < len(files):
        log.warning("left out: %s: no run card", listed(map(str, others)))
        files = [file for file in files if file not in others]
    cards: dict[Path, RunCard] = {}
    for file in files:
        card = RunCard.read(file)
        if not card.results or card not in cards.values():
            cards[file] = card
    for file, other in permutations([*cards], 2):  # an artifact in a package has the card of its time
        if file in cards and other in cards and _repeats(cards[other], cards[file]):
            cards.pop(other)
    return cards


def _repeats(card: RunCard, other: RunCard) -> bool:
    """Whether all results of `card` are of the artifact of `other`, which has them, or newer ones, too."""
    if not (card.artifact and card.results and other.artifact and card.artifact["sha256"] == other.artifact["sha256"]):
        return False
    return len(with_results(other, card.measured()).results) == len(other.results)
