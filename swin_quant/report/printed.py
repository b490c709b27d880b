"""Results that are tables: printed, shown in a notebook, or as text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from swin_quant.report.table import NARROW, WIDE, ReportTable, html_table, print_fitted, terminal


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
