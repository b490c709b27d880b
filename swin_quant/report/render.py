"""The accuracy-delta table in four formats, each with its footnotes: rounded for people, unrounded for programs."""

import csv
import html
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence

from swin_quant.base.files import finite
from swin_quant.cards.card import RunCard
from swin_quant.report.footnotes import Footnote, attributed, footnotes
from swin_quant.report.table import COLUMNS, Column, ReportRow, legend, rows_of, shown
from swin_quant.report.terminal import terminal

SCHEMA = "swin-quant/accuracy-table/1"
_DEFAULT_WIDTH = 100


def render(cards: Sequence[RunCard], form: str = "terminal") -> str:
    """The table of `cards` as text: `form` is one of FORMATS."""
    rows = rows_of(cards)
    return FORMATS[form](rows, footnotes(rows))


def print_terminal(cards: Sequence[RunCard]) -> None:
    """Print the table of `cards`, as wide as the terminal or, into a pipe, 100 columns."""
    rows = rows_of(cards)
    width = shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns
    print_text(terminal(rows, footnotes(rows), width, color=sys.stdout.isatty()))


def print_text(text: str) -> None:
    """Print to standard output; what its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def markdown(rows: Sequence[ReportRow], notes: Sequence[Footnote]) -> str:
    """A pipe table of GitHub's Markdown, and a list of footnotes."""
    columns = shown(rows)
    lines = [
        [column.title for column in columns],
        ["---:" if column.form else "---" for column in columns],
        *([_markdown_cell(column, row) for column in columns] for row in rows),
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    remarks = [*legend(rows), *map(_markdown_text, attributed(notes, rows))]
    return table + "\n" + "".join(f"* {remark}\n" for remark in remarks)


def comma_separated(rows: Sequence[ReportRow], notes: Sequence[Footnote]) -> str:
    """CSV (RFC 4180): keys, then unrounded figures, empty where nothing was measured; the last column has footnotes."""
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow([*(column.key for column in COLUMNS), "notes"])
    about: list[list[str]] = [[] for _ in rows]
    for note in notes:
        for index in note.rows:
            about[index].append(note.text)
    for row, said in zip(rows, about, strict=True):
        writer.writerow([_no_formula(value) for value in (*(c.value(row) for c in COLUMNS), " | ".join(said))])
    return output.getvalue()


def as_json(rows: Sequence[ReportRow], notes: Sequence[Footnote]) -> str:
    """JSON: unrounded figures by the same keys as CSV, null where nothing was measured; footnotes with their rows."""
    content = {
        "schema": SCHEMA,
        "rows": [{column.key: column.value(row) for column in COLUMNS} for row in rows],
        "footnotes": [{"text": note.text, "rows": note.rows} for note in notes],
    }
    return json.dumps(finite(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[ReportRow], Sequence[Footnote]], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "csv": comma_separated,
    "json": as_json,
}


def _markdown_cell(column: Column, row: ReportRow) -> str:
    is_text = isinstance(column.value(row), str)
    return _markdown_text(column.cell(row)) if is_text else column.cell(row)


def _markdown_text(text: str) -> str:
    """Text that Markdown shows as it is; underscores inside words mean nothing to it and stay readable."""
    text = re.sub(r"[\\`*~\[\]]|\b_|_\b", r"\\\g<0>", html.escape(text, quote=False))
    return text.replace("|", "&#124;").replace("\n", " ")  # parsers differ on a backslash before a pipe


def _no_formula(value: object) -> object:
    """Text that a spreadsheet would take for a formula, made text again."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
