"""A table as HTML, for notebooks."""

import html
from collections.abc import Mapping

from swin_quant.report.column import Column, ReportTable, Row, Value, shown

_STYLES = {"bold": "font-weight: bold", "dim": "opacity: 0.6", "red": "color: #b00", "green": "color: #080",
           "yellow": "color: #850"}  # fmt: skip
_RIGHT, _LEFT = "text-align: right", "text-align: left"


def html_table(table: ReportTable[Row], heading: str = "") -> str:
    """A heading if there is one, a <table>, and a list of the remarks. Text is escaped."""
    columns = shown(table.columns, table.rows)
    titles = [(column.title, _RIGHT if column.right else _LEFT) for column in columns]
    lines = [_line("th", titles)] if any(column.title.strip() for column in columns) else []
    for row in table.rows:
        whole = table.style(row) if table.style else ""
        lines.append(_line("td", [(column.cell(row), _looks(column, row, whole)) for column in columns]))
    said = "".join(f"<li>{_text(remark)}</li>" for remark in table.remarks)
    head = f"<p><b>{_text(heading)}</b></p>" if heading else ""
    below = f"<ul>{said}</ul>" if said else ""
    return f"<div>{head}<table>{''.join(lines)}</table>{below}</div>"


def html_facts(heading: str, facts: Mapping[str, Value]) -> str:
    """A table of two columns: what, and its value; what there is not is left out."""
    columns: tuple[Column[tuple[str, Value]], ...] = (
        Column("what", " ", lambda fact: fact[0], style=lambda _: "dim"),
        Column("value", " ", lambda fact: fact[1]),
    )
    return html_table(ReportTable(columns, [fact for fact in facts.items() if fact[1] not in (None, "")]), heading)


def _line(tag: str, cells: list[tuple[str, str]]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{looks}">{_text(cell)}</{tag}>' for cell, looks in cells) + "</tr>"


def _looks(column: Column[Row], row: Row, whole: str) -> str:
    own = column.style(row) if column.style else ""
    return "; ".join((_RIGHT if column.right else _LEFT, *(_STYLES[style] for style in (whole, own) if style)))


def _text(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
