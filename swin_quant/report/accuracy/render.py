"""The accuracy-delta table in four formats, each with its footnotes: rounded for people, unrounded for programs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.report import screen
from swin_quant.report.accuracy.columns import COLUMN, COLUMNS, SHARED, SHORT, legend, notes_column
from swin_quant.report.accuracy.footnotes import Footnote, footnotes, numbered
from swin_quant.report.accuracy.rows import AccuracyRow, rows_of
from swin_quant.report.accuracy.terminal import terminal
from swin_quant.report.column import BLANK, Column, ReportTable
from swin_quant.report.html import html_table
from swin_quant.report.markdown import markdown
from swin_quant.report.records import comma_separated, json_text, records
from swin_quant.report.terminal import terminal as plain_table

ALL = "all"  # in place of the keys of columns
SCHEMA = "swin-quant/accuracy-table/1"


@dataclass(frozen=True)
class AccuracyTable:
    """Rows and footnotes, found once for all forms."""

    rows: Sequence[AccuracyRow]
    notes: Sequence[Footnote]
    columns: Sequence[Column[AccuracyRow]] = COLUMNS
    shared: str = ""

    @classmethod
    def of(cls, cards: Sequence[RunCard], keys: Sequence[str] = ()) -> "AccuracyTable":
        """All columns, or those of `keys`, in that order. UsageError for a key that there is not."""
        rows = rows_of(cards)
        chosen = COLUMNS if list(keys) in ([], [ALL]) else [_column(key) for key in keys]
        return cls(rows, footnotes(rows), chosen)

    def text(self, form: str) -> str:
        """The table in a form, one of FORMATS."""
        return FORMATS[form](self)

    def show(self) -> None:
        """Print it, as wide as the terminal or, into a pipe, 100 columns."""
        screen.print_text(_on_terminal(self, screen.width(screen.NARROW), screen.has_colors()))

    def report(self) -> ReportTable[AccuracyRow]:
        """Columns, rows, and what is to be said below them."""
        said, marks = numbered(self.notes, len(self.rows))
        columns = [*self.columns, notes_column(self.rows, marks)]
        return ReportTable(columns, self.rows, [*filter(None, [self.shared]), *legend(self.rows), *said])

    def short(self) -> "AccuracyTable":
        """As narrow as can be read: a choice of columns; what rows share is said once below."""
        cells = {key: {COLUMN[key].cell(row) for row in self.rows} for key in SHARED}
        same = {key: found.pop() for key, found in cells.items() if len(found) == 1}
        said = ", ".join(f"{key.replace('_', ' ')} {cell}" for key, cell in same.items() if cell != BLANK)
        more = [key for key in SHARED if key not in same and COLUMN[key].title]
        keys = [key for key in SHORT if key not in SHARED] + more
        return replace(self, columns=[COLUMN[key] for key in keys], shared=f"all rows: {said}" if said else "")


def _column(key: str) -> Column[AccuracyRow]:
    if key not in COLUMN:
        close = get_close_matches(key, COLUMN, 1)
        meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(COLUMN)}"
        raise UsageError(f"‹columns› {key!r:.60}: there is none{meant}")
    return COLUMN[key]


def render(cards: Sequence[RunCard], form: str = "terminal") -> str:
    """The table of `cards` as text: `form` is one of FORMATS."""
    return AccuracyTable.of(cards).text(form)


def print_terminal(cards: Sequence[RunCard]) -> None:
    """Print the table of `cards`."""
    AccuracyTable.of(cards).show()


def as_html(cards: Sequence[RunCard], leave_out: Collection[str] = ()) -> str:
    """The table of `cards` as HTML, without the columns of the keys `leave_out`."""
    return html_table(AccuracyTable.of(cards, [key for key in COLUMN if key not in leave_out]).report())


def _on_terminal(table: AccuracyTable, width: int = screen.NARROW, color: bool = False) -> str:
    """With a heading of what rows share where all columns are shown; else the columns side by side."""
    if table.columns is COLUMNS:
        return terminal(table.rows, table.notes, width, color)
    return plain_table(table.report(), width, color)


def _as_markdown(table: AccuracyTable) -> str:
    """A pipe table of GitHub's Markdown, and a list of footnotes."""
    return markdown(table.report())


def _as_csv(table: AccuracyTable) -> str:
    """CSV: unrounded figures, empty where nothing was measured; the last column has footnotes."""
    about: dict[int, list[str]] = {id(row): [] for row in table.rows}
    for note in table.notes:
        for index in note.rows:
            about[id(table.rows[index])].append(note.text)
    said: Column[AccuracyRow] = Column("notes", "", lambda row: " | ".join(about[id(row)]))
    return comma_separated([*table.columns, said], table.rows)


def _as_json(table: AccuracyTable) -> str:
    """JSON: unrounded figures by the same keys as CSV, null where nothing was measured; footnotes with their rows."""
    said = [{"text": note.text, "rows": note.rows} for note in table.notes]
    return json_text({"schema": SCHEMA, "rows": records(table.columns, table.rows), "footnotes": said})


FORMATS: dict[str, Callable[[AccuracyTable], str]] = {
    "terminal": _on_terminal,
    "markdown": _as_markdown,
    "csv": _as_csv,
    "json": _as_json,
}
