"""The accuracy-delta table as terminal text, Markdown, CSV, JSON and HTML, each with its footnotes.

People read blocks: a line for each result under a heading with what the results share. A narrow terminal leaves out
columns that CSV and JSON have. Whoever chooses columns gets a row for each quantized result, as in these.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import UsageError, did_you_mean
from swin_quant.cards.card import RunCard
from swin_quant.report import table as tables
from swin_quant.report.accuracy import blocks
from swin_quant.report.accuracy.blocks import Line, TableBlock, blocks_of
from swin_quant.report.accuracy.footnotes import Footnote, footnotes, numbered
from swin_quant.report.accuracy.rows import COLUMN, COLUMNS, AccuracyRow, legend, notes_column, rows_of
from swin_quant.report.table import NARROW, Column, ReportTable, bullets, folded, styled

ALL = "all"  # in place of the keys of columns
SCHEMA = "swin-quant/accuracy-table/1"


@dataclass(frozen=True)
class AccuracyTable:
    """Rows and footnotes, found once for all forms. `columns`: those that were chosen; empty: people get blocks."""

    rows: Sequence[AccuracyRow]
    notes: Sequence[Footnote]
    columns: Sequence[Column[AccuracyRow]] = ()

    @classmethod
    def of(cls, cards: Sequence[RunCard], keys: Sequence[str] = ()) -> "AccuracyTable":
        """With a choice of columns, or `all`. UsageError for an unknown key."""
        rows = rows_of(cards)
        return cls(rows, footnotes(rows), COLUMNS if list(keys) == [ALL] else [_column(key) for key in keys])

    def text(self, form: str) -> str:
        """The table in one of FORMATS."""
        return FORMATS[form](self)

    def show(self) -> None:
        """Print it as wide as the terminal, or 100 columns wide into a pipe."""
        tables.print_text(_on_terminal(self, tables.screen_width(NARROW), tables.has_colors()))

    def report(self) -> ReportTable[AccuracyRow]:
        """The chosen columns, rows, and the remarks below them."""
        texts, marks = numbered(self.notes, len(self.rows))
        return ReportTable([*self.columns, notes_column(self.rows, marks)], self.rows, [*legend(self.rows), *texts])

    def as_data(self) -> dict[str, Any]:
        """For JSON: the rows by the same keys as CSV; footnotes with the indices of their rows."""
        texts = [{"text": note.text, "rows": note.rows} for note in self.notes]
        return {"schema": SCHEMA, "rows": tables.records(self.columns or COLUMNS, self.rows), "footnotes": texts}

    def blocks(self) -> tuple[list[TableBlock], list[str]]:
        """The blocks that people read, and the remarks below them."""
        texts, marks = numbered(self.notes, len(self.rows), in_cells=True)
        found = blocks_of(self.rows, marks)
        return found, [*blocks.legend(found), *texts]


def _column(key: str) -> Column[AccuracyRow]:
    if key not in COLUMN:
        meant = did_you_mean(key, COLUMN) or f"; there are {', '.join(COLUMN)}"
        raise UsageError(f"‹columns› {key!r:.60}: there is none{meant}")
    return COLUMN[key]


def render(cards: Sequence[RunCard], form: str = "terminal") -> str:
    """The table of `cards` as text in one of FORMATS."""
    return AccuracyTable.of(cards).text(form)


def as_html(cards: Sequence[RunCard]) -> str:
    """The blocks of `cards` as HTML."""
    found, remarks = AccuracyTable.of(cards).blocks()
    last = len(found) - 1
    return "".join(
        tables.html_table(_table_of(block, remarks if number == last else ()), _heading(block))
        for number, block in enumerate(found)
    )


def _table_of(block: TableBlock, remarks: Sequence[str] = (), width: int | None = None) -> ReportTable[Line]:
    return ReportTable(block.columns(width), block.lines, remarks)


def _heading(block: TableBlock) -> str:
    return f"{block.name}: {', '.join(block.details)}"


def _on_terminal(table: AccuracyTable, width: int = NARROW, color: bool = False) -> str:
    if table.columns:
        return tables.terminal(table.report(), width, color)
    found, remarks = table.blocks()
    lines = (line for block in found for line in _lines(block, width, color))
    return "".join(f"{line}\n" for line in (*lines, *bullets(remarks, width, color)))


def _lines(block: TableBlock, width: int, color: bool) -> Iterator[str]:
    first, *more = folded(_heading(block), width)
    yield from (styled(first, "bold" * color), *more)
    table = _table_of(block, width=width)
    widths = tables.widths_of(table.columns, block.lines, width)
    yield from tables.grid(table.columns, block.lines, widths, color, rule=True)
    yield ""


def _as_markdown(table: AccuracyTable) -> str:
    if table.columns:
        return tables.markdown(table.report())
    found, remarks = table.blocks()
    parts = (f"**{tables.escaped(_heading(block))}**\n\n{tables.markdown(_table_of(block))}" for block in found)
    return "".join(parts) + "".join(f"* {tables.escaped(remark)}\n" for remark in remarks)


def _as_csv(table: AccuracyTable) -> str:
    """The last column has the row's footnotes."""
    about: dict[int, list[str]] = {id(row): [] for row in table.rows}
    for note in table.notes:
        for index in note.rows:
            about[id(table.rows[index])].append(note.text)
    texts: Column[AccuracyRow] = Column("notes", "", lambda row: " | ".join(about[id(row)]))
    return tables.comma_separated([*(table.columns or COLUMNS), texts], table.rows)


def _as_json(table: AccuracyTable) -> str:
    return tables.json_text(table.as_data())


FORMATS: dict[str, Callable[[AccuracyTable], str]] = {
    "terminal": _on_terminal,
    "markdown": _as_markdown,
    "csv": _as_csv,
    "json": _as_json,
}
