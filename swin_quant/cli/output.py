"""Write a command's results, and show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swin_quant.cards.card import RunCard
    from swin_quant.report.verdict import DeployVerdict


def print_table(cards: Sequence[RunCard]) -> None:
    """The accuracy-delta table on standard output."""
    from swin_quant.report.accuracy import AccuracyTable

    AccuracyTable.of(cards).show()


def show(cards: Sequence[RunCard], json: str | None, verdicts: Sequence[DeployVerdict] = ()) -> None:
    """The table, and the verdicts of a verb that has some; or as --json says."""
    from swin_quant.report.accuracy import AccuracyTable
    from swin_quant.report.table import json_text

    table = AccuracyTable.of(cards)
    if json != "-":
        if cards:
            table.show()
        print_verdicts(verdicts)
    if json:
        told = {"verdicts": [one.to_dict() for one in verdicts]} if verdicts else {}
        put(json, json_text(table.as_data() | told))


def print_verdicts(verdicts: Sequence[DeployVerdict]) -> None:
    """Verdicts on standard output, a blank line before each."""
    from swin_quant.report.table import NARROW, print_text, screen_width

    for one in verdicts:
        print_text("\n" + one.text(screen_width(NARROW)))


def put(target: str, text: str) -> None:
    """Write JSON where --json wants it: "-" is standard output, else a file."""
    from swin_quant.base.files import atomic_write_bytes
    from swin_quant.base.progress import log

    if target == "-":
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        atomic_write_bytes(target, text.encode())
        log.info("JSON: %s", target)
