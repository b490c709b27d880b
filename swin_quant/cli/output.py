"""Write a command's results, and show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swin_quant.cards.card import RunCard


def print_table(cards: Sequence[RunCard]) -> None:
    """The accuracy-delta table on standard output."""
    from swin_quant.report.accuracy.render import AccuracyTable

    AccuracyTable.of(cards).show()


def show(cards: Sequence[RunCard], json: str | None) -> None:
    """Print the table, or write JSON as --json says."""
    from swin_quant.report.accuracy.render import render

    if json != "-":
        print_table(cards)
    if json:
        put(json, render(cards, "json"))


def put(target: str, text: str) -> None:
    """Write JSON where --json wants it: "-" is standard output, else a file."""
    from swin_quant.base.files import atomic_write_bytes
    from swin_quant.base.progress import log

    if target == "-":
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        atomic_write_bytes(target, text.encode())
        log.info("JSON: %s", target)
