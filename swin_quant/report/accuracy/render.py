"""The accuracy-delta table in four formats, each with its footnotes: rounded for people, unrounded for programs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from swin_quant.cards.card import RunCard
from swin_quant.report import markdown as md
from swin_quant.report import screen
from swin_quant.report.accuracy.columns import COLUMNS, legend
from swin_quant.report.accuracy.footnotes import Footnote, attributed, footnotes
from swin_quant.report.accuracy.rows import AccuracyRow, rows_of
from swin_quant.report.accuracy.terminal import terminal
from swin_quant.report.column import Column, ReportTable
from swin_quant.report.html import html_table
from swin_quant.report.records import comma_separated, json_text, records

SCHEMA = "swin-quant/accuracy-table/1"


@dataclass(frozen=True)
class AccuracyTable:
    """Rows and footnotes, found once for all forms."""

    rows: Sequence[AccuracyRow]
    notes: Sequence[Footnote]

    @classmethod
    def of(cls, cards: Sequence[RunCard]) -> "AccuracyTable":
        """The table of `cards`."""
        rows = rows_of(cards)
        return cls(rows, footnotes(rows))

    def text(self, form: str) -> str:
        """The table in a form, one of FORMATS."""
        return FORMATS[form](self.rows, self.notes)

    def show(self) -> None:
        """Print it, as wide as the terminal or, into a pipe, 100 columns."""
        screen.print_text(terminal(self.rows, self.notes, screen.width(screen.NARROW), screen.has_colors()))


def render(cards: Sequence[RunCard], form: str = "terminal") -> str:
    """The table of `cards` as text: `form` is one of FORMATS."""
    return AccuracyTable.of(cards).text(form)


def print_terminal(cards: Sequence[RunCard]) -> None:
    """Print the table of `cards`."""
    AccuracyTable.of(cards).show()


def markdown(rows: Sequence[AccuracyRow], notes: Sequence[Footnote]) -> str:
    """A pipe table of GitHub's Markdown, and a list of footnotes."""
    return md.markdown(_table(rows, notes))


def as_html(cards: Sequence[RunCard], leave_out: Collection[str] = ()) -> str:
    """The table of `cards` as HTML, without the columns of the keys `leave_out`."""
    found = AccuracyTable.of(cards)
    table = _table(found.rows, found.notes)
    return html_table(replace(table, columns=[column for column in table.columns if column.key not in leave_out]))


def _table(rows: Sequence[AccuracyRow], notes: Sequence[Footnote]) -> ReportTable[AccuracyRow]:
    return ReportTable(COLUMNS, rows, [*legend(rows), *attributed(notes, rows)])


def as_csv(rows: Sequence[AccuracyRow], notes: Sequence[Footnote]) -> str:
    """CSV: unrounded figures, empty where nothing was measured; the last column has footnotes."""
    about: dict[int, list[str]] = {id(row): [] for row in rows}
    for note in notes:
        for index in note.rows:
            about[id(rows[index])].append(note.text)
    said: Column[AccuracyRow] = Column("notes", "", lambda row: " | ".join(about[id(row)]))
    return comma_separated([*COLUMNS, said], rows)


def as_json(rows: Sequence[AccuracyRow], notes: Sequence[Footnote]) -> str:
    """JSON: unrounded figures by the same keys as CSV, null where nothing was measured; footnotes with their rows."""
    said = [{"text": note.text, "rows": note.rows} for note in notes]
    return json_text({"schema": SCHEMA, "rows": records(COLUMNS, rows), "footnotes": said})


FORMATS: dict[str, Callable[[Sequence[AccuracyRow], Sequence[Footnote]], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "csv": as_csv,
    "json": as_json,
}
