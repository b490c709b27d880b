"""Write a command's results, and show them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_quant.base.files import atomic_write_bytes, json_text
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.report.table import (
    NARROW,
    WIDE,
    ReportTable,
    html_table,
    print_fitted,
    print_text,
    screen_width,
    terminal,
)

if TYPE_CHECKING:
    from swin_quant.base.shards import Sharding
    from swin_quant.report.verdict import DeployVerdict


class Printed(ABC):
    """A result that Python prints as its tables, 80 columns wide, and a notebook shows as HTML."""

    @abstractmethod
    def tables(self) -> Sequence[ReportTable[Any]]:
        """The tables of the result, in order."""

    def show(self, otherwise: int = WIDE) -> None:
        """Print the tables as wide as the terminal, or `otherwise` columns wide into a pipe."""
        print_fitted(self.text, otherwise)

    def text(self, width: int, color: bool = False) -> str:
        """The tables for a terminal of `width` columns."""
        return "\n".join(terminal(one, width, color) for one in self.tables())

    def __str__(self) -> str:
        return self.text(NARROW)

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self.tables()))


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
