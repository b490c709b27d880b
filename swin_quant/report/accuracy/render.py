"""The accuracy-delta table as terminal text, Markdown, CSV, JSON and HTML, each with its footnotes.

The full table on a terminal has a heading with the cells that rows share and the float figures, then a line for each
row. A narrow terminal stacks columns; if that is too wide as well, lines wrap, and nothing is lost.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from swin_quant.base.errors import UsageError, did_you_mean
from swin_quant.cards.card import RunCard
from swin_quant.report import table as tables
from swin_quant.report.accuracy.footnotes import Footnote, footnotes, numbered
from swin_quant.report.accuracy.rows import (
    COLUMN,
    COLUMNS,
    SHARED,
    SHORT,
    AccuracyRow,
    dataset_key,
    is_float,
    legend,
    notes_column,
    rows_of,
)
from swin_quant.report.table import BLANK, NARROW, Column, ReportTable, bullets, folded, styled, total, widths_of

ALL = "all"  # in place of the keys of columns
SCHEMA = "swin-quant/accuracy-table/1"

Stack: TypeAlias = tuple[str, ...]  # keys of columns that are stacked into one
_HEADING = ("name", "resolution", "dataset", "pictures")
_AFTER = {"pictures": " pictures", "calibrator": " calibrator"}  # behind the cells in the heading
_HEADING_IF_SHARED = ("calibrator", "precision", "engine")
_FLOAT = ("acc1", "acc5", "half_precision", "half_acc1")
_TWO_LINES: tuple[Stack, ...] = (
    ("policy", "weights", "calibrator"),
    ("quantized_acc1", "quantized_acc5"),
    ("delta_acc1", "delta_acc5"),
    ("agreement", "sqnr_db"),
    ("quantized_ms", "precision"),
    ("engine", "own_precision"),
    ("own_acc1", "own_ms"),
)
_ONE_LINE: tuple[Stack, ...] = tuple(
    (key,)
    for key in """policy weights precision calibrator quantized_acc1 quantized_acc5 delta_acc1 delta_acc5
    agreement sqnr_db quantized_ms engine own_precision own_acc1 own_ms""".split()
)


@dataclass(frozen=True)
class AccuracyTable:
    """Rows and footnotes, found once for all forms. `shared`: a sentence on the cells that all rows share."""

    rows: Sequence[AccuracyRow]
    notes: Sequence[Footnote]
    columns: Sequence[Column[AccuracyRow]] = COLUMNS
    shared: str = ""

    @classmethod
    def of(cls, cards: Sequence[RunCard], keys: Sequence[str] = ()) -> "AccuracyTable":
        """All columns, or those of `keys` in that order. UsageError for an unknown key."""
        rows = rows_of(cards)
        chosen = COLUMNS if list(keys) in ([], [ALL]) else [_column(key) for key in keys]
        return cls(rows, footnotes(rows), chosen)

    def text(self, form: str) -> str:
        """The table in one of FORMATS."""
        return FORMATS[form](self)

    def show(self) -> None:
        """Print it as wide as the terminal, or 100 columns wide into a pipe."""
        tables.print_text(_on_terminal(self, tables.screen_width(NARROW), tables.has_colors()))

    def report(self) -> ReportTable[AccuracyRow]:
        """Columns, rows, and the remarks below them."""
        texts, marks = numbered(self.notes, len(self.rows))
        columns = [*self.columns, notes_column(self.rows, marks)]
        return ReportTable(columns, self.rows, [*filter(None, [self.shared]), *legend(self.rows), *texts])

    def short(self) -> "AccuracyTable":
        """A narrow table with few columns; a cell that all rows share is said once below."""
        cells = {key: {COLUMN[key].cell(row) for row in self.rows} for key in SHARED}
        same = {key: found.pop() for key, found in cells.items() if len(found) == 1}
        texts = ", ".join(f"{key.replace('_', ' ')} {cell}" for key, cell in same.items() if cell != BLANK)
        more = [key for key in SHARED if key not in same and COLUMN[key].title]
        keys = [key for key in SHORT if key not in SHARED] + more
        return replace(self, columns=[COLUMN[key] for key in keys], shared=f"all rows: {texts}" if texts else "")


def _column(key: str) -> Column[AccuracyRow]:
    if key not in COLUMN:
        meant = did_you_mean(key, COLUMN) or f"; there are {', '.join(COLUMN)}"
        raise UsageError(f"‹columns› {key!r:.60}: there is none{meant}")
    return COLUMN[key]


def render(cards: Sequence[RunCard], form: str = "terminal") -> str:
    """The table of `cards` as text in one of FORMATS."""
    return AccuracyTable.of(cards).text(form)


def as_html(cards: Sequence[RunCard], leave_out: Collection[str] = ()) -> str:
    """The table of `cards` as HTML, without the columns whose keys are in `leave_out`."""
    return tables.html_table(AccuracyTable.of(cards, [key for key in COLUMN if key not in leave_out]).report())


def _on_terminal(table: AccuracyTable, width: int = NARROW, color: bool = False) -> str:
    """All columns under headings; a choice of columns side by side."""
    if table.columns is COLUMNS:
        return terminal(table.rows, table.notes, width, color)
    return tables.terminal(table.report(), width, color)


def _as_markdown(table: AccuracyTable) -> str:
    return tables.markdown(table.report())


def _as_csv(table: AccuracyTable) -> str:
    """The last column has the row's footnotes."""
    about: dict[int, list[str]] = {id(row): [] for row in table.rows}
    for note in table.notes:
        for index in note.rows:
            about[id(table.rows[index])].append(note.text)
    texts: Column[AccuracyRow] = Column("notes", "", lambda row: " | ".join(about[id(row)]))
    return tables.comma_separated([*table.columns, texts], table.rows)


def _as_json(table: AccuracyTable) -> str:
    """The rows by the same keys as CSV; footnotes with the indices of their rows."""
    texts = [{"text": note.text, "rows": note.rows} for note in table.notes]
    rows = tables.records(table.columns, table.rows)
    return tables.json_text({"schema": SCHEMA, "rows": rows, "footnotes": texts})


FORMATS: dict[str, Callable[[AccuracyTable], str]] = {
    "terminal": _on_terminal,
    "markdown": _as_markdown,
    "csv": _as_csv,
    "json": _as_json,
}


def terminal(rows: Sequence[AccuracyRow], notes: Sequence[Footnote], width: int = NARROW, color: bool = False) -> str:
    """All columns and the footnotes for a terminal of `width` columns, with ANSI styles if `color`."""
    texts, marks = numbered(notes, len(rows))
    marked = notes_column(rows, marks)
    lines = (*_lines(rows, marked, width, color), *bullets((*legend(rows), *texts), width, color))
    return "".join(f"{line}\n" for line in lines)


def _lines(rows: Sequence[AccuracyRow], marked: Column[AccuracyRow], width: int, color: bool) -> Iterator[str]:
    quantized = [row for row in rows if row.quantized]
    shared = [key for key in _HEADING_IF_SHARED if _is_shared(key, quantized)]
    left_out = {*shared, *COLUMN.keys() - {column.key for column in tables.shown(COLUMNS, rows)}}
    notes = tables.shown([marked], quantized)
    layouts = [[*_stacked(layout, left_out), *notes] for layout in (_ONE_LINE, _TWO_LINES)]
    columns = next((one for one in layouts if total(widths_of(one, quantized)) <= width), layouts[-1])
    widths = widths_of(columns, quantized, width)
    for block in _blocks(rows):
        lines = [row for row in block if row.quantized]
        head = (lines or block)[0]
        yield from _heading(head, shared, "" if lines else marked.cell(head), width, color)
        yield from folded(_float_figures(block), width)
        if lines:
            yield from tables.grid(columns, lines, widths, color, rule=True)
        yield ""


def _stacked(layout: Sequence[Stack], left_out: set[str]) -> list[Column[AccuracyRow]]:
    """The columns of a layout; the first and the engine's may fold."""
    stacks = ([COLUMN[key] for key in stack if key not in left_out] for stack in layout)
    first, *others = [_stack(stack) for stack in stacks if stack]
    return [replace(first, fold=True), *(replace(one, fold=one.key == "engine") for one in others)]


def _stack(columns: Sequence[Column[AccuracyRow]]) -> Column[AccuracyRow]:
    """Several columns as one, a line for each."""

    def cells(row: AccuracyRow) -> str:
        return "\n".join(column.cell(row) for column in columns)

    title = "\n".join(column.title for column in columns)
    return replace(columns[0], title=title, of=lambda row: True, show=cells)


def _is_shared(key: str, rows: Sequence[AccuracyRow]) -> bool:
    """Whether rows share a cell; a float artifact, which has no calibrator, does not count for that column."""
    of = [row for row in rows if key != "calibrator" or (row.quantized and not is_float(row.quantized))]
    return len({COLUMN[key].cell(row) for row in of}) == 1


def _blocks(rows: Sequence[AccuracyRow]) -> list[list[AccuracyRow]]:
    """The rows under each heading: they share name, pictures and float accuracy."""
    blocks: dict[tuple[str, ...], list[AccuracyRow]] = {}
    for row in rows:
        key = *(COLUMN[key].cell(row) for key in (*_HEADING, *_FLOAT)), *dataset_key(row.dataset)
        blocks.setdefault(key, []).append(row)
    return list(blocks.values())


def _heading(row: AccuracyRow, shared: Sequence[str], marks: str, width: int, color: bool) -> list[str]:
    name, *details = ((COLUMN[key].cell(row), _AFTER.get(key, "")) for key in (*_HEADING, *shared))
    texts = (f"  {cell}{after}" for cell, after in details if cell != BLANK)
    first, *more = folded(name[0] + "".join(texts) + (f"  [{marks}]" if marks else ""), width)
    end = len(name[0]) if first.startswith(name[0]) else len(first)
    return [styled(first[:end], "bold" * color) + first[end:], *more]


def _float_figures(block: Sequence[AccuracyRow]) -> str:
    """Float accuracy, and the range of the float latencies, which each card of the block measured anew."""
    figures = [("float32", *(_titled(key, block) for key in ("acc1", "acc5", "ms")))]
    if half := block[0].half:
        figures.append((half.precision, *(_titled(key, block) for key in ("half_acc1", "half_ms"))))
    return "    ".join("  ".join(words) for words in figures)


def _titled(key: str, block: Sequence[AccuracyRow]) -> str:
    cells = {value: COLUMN[key].cell(row) for row in block if isinstance(value := COLUMN[key].value(row), int | float)}
    ends = dict.fromkeys((cells[min(cells)], cells[max(cells)])) if cells else [BLANK]
    return f"{COLUMN[key].title} {' to '.join(ends)}"
