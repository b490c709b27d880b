"""A table as Markdown."""

import html
import re
from collections.abc import Iterable

from swin_quant.report.column import Column, ReportTable, Row, shown


def markdown(table: ReportTable[Row]) -> str:
    """A pipe table of GitHub's Markdown, and a list of the remarks."""
    columns = shown(table.columns, table.rows)
    lines: Iterable[list[str]] = (
        [column.title for column in columns],
        ["---:" if column.right else "---" for column in columns],
        *([_cell(column, row) for column in columns] for row in table.rows),
    )
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "\n" + "".join(f"* {escaped(remark)}\n" for remark in table.remarks)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; underscores inside words mean nothing to it and stay readable."""
    text = re.sub(r"[\\`*~\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(text, quote=False))
    return text.replace("|", "&#124;").replace("\n", " ")  # parsers differ on a backslash before a pipe


def _cell(column: Column[Row], row: Row) -> str:
    cell = column.cell(row)
    return escaped(cell) if isinstance(column.value(row), str) else cell
