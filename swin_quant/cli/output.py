"""Write a command's results, and show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.files import atomic_write_bytes, json_text
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.report.printed import Printed as Printed
from swin_quant.report.table import NARROW, print_text, screen_width

if TYPE_CHECKING:
    from swin_quant.base.shards import Sharding
    from swin_quant.report.verdict import DeployVerdict


def tell(target: str | None, show: Callable[[], object], data: Any) -> None:
    """Write a result's data as JSON where --json wants it, and show the result; "-": JSON alone, on standard output."""
    if target == "-":
        print(json_text(data), end="")
        return
    if target:
        atomic_write_bytes(target, json_text(data).encode())
        log.info("JSON: %s", target)
    show()


def sharding(folder: str | None, pictures: int | None) -> Sharding | None:
    """Parquet files in `folder`, with this many pictures each (None: the usual number); None without a folder."""
    from swin_quant.base.shards import ROWS, Sharding

    return Sharding(Path(folder), ROWS if pictures is None else pictures) if folder else None


def show_cards(cards: Sequence[RunCard], json: str | None = None, verdicts: Sequence[DeployVerdict] = ()) -> None:
    """The accuracy-delta table, and the verdicts of a verb that has some; or as --json says."""
    from swin_quant.report.accuracy import AccuracyTable

    table = AccuracyTable.of(cards)

    def show() -> None:
        if cards:
            table.show()
        print_verdicts(verdicts)

    told = {"verdicts": [one.to_dict() for one in verdicts]} if verdicts else {}
    tell(json, show, table.as_data() | told)


def print_verdicts(verdicts: Sequence[DeployVerdict]) -> None:
    """Verdicts on standard output, a blank line before each."""
    for one in verdicts:
        print_text("\n" + one.text(screen_width(NARROW)))
