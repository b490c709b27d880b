"""A table for a terminal. Figures are never cut or folded: where the width is short, names are, and then lines wrap."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from swin_quant.report.column import Column, ReportTable, Row, shown

STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
GAP = 2
_NARROWEST = 10  # how far a column that may fold is narrowed
_CONSOLE = Console(file=None, width=80)


def terminal(table: ReportTable[Row], width: int, color: bool = False) -> str:
    """The table and its remarks for a terminal of `width` columns; with ANSI styles if `color`."""
    columns = shown(table.columns, table.rows)
    lines = grid(columns, table.rows, widths_of(columns, table.rows, width), color, style=table.style)
    return "".join(f"{line}\n" for line in (*lines, *bullets(table.remarks, width, color)))


def widths_of(columns: Sequence[Column[Row]], rows: Iterable[Row], width: int | None = None) -> list[int]:
    """What each column needs; those that may fold are narrowed until all fit into `width`, if they do."""
    rows = list(rows)
    texts = ([column.title, *map(column.cell, rows)] for column in columns)
    widths = [max(cell_len(line) for text in column for line in text.split("\n")) for column in texts]
    can_fold = [index for index, column in enumerate(columns) if column.fold]
    while width is not None and can_fold and total(widths) > width:
        widest = max(can_fold, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths


def total(widths: Sequence[int]) -> int:
    """How wide columns are side by side."""
    return sum(widths) + GAP * (len(widths) - 1)


def grid(
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    widths: Sequence[int],
    color: bool = False,
    rule: bool = False,
    style: Callable[[Row], str] | None = None,
) -> Iterator[str]:
    """The lines of columns side by side: titles, a `rule` if wanted, rows."""
    titles = [column.title.split("\n") for column in columns]
    height = max(map(len, titles), default=0)
    yield from _side_by_side(
        [[""] * (height - len(title)) + title for title in titles], columns, widths, ["bold" * color] * len(columns)
    )
    if rule:
        yield "─" * total(widths)
    for row in rows:
        cells = [folded(column.cell(row), width) for column, width in zip(columns, widths, strict=True)]
        of_row = style(row) if style and color else ""
        styles = [(color and column.style and column.style(row)) or of_row for column in columns]
        yield from _side_by_side(cells, columns, widths, styles)


def _side_by_side(
    cells: Sequence[Sequence[str]], columns: Sequence[Column[Row]], widths: Sequence[int], styles: Sequence[str]
) -> Iterator[str]:
    for number in range(max(map(len, cells), default=0)):
        line = ""
        for cell, column, width, style in zip(cells, columns, widths, styles, strict=True):
            text = cell[number] if number < len(cell) else ""
            room = " " * (width - cell_len(text))
            line += (room + styled(text, style) if column.right else styled(text, style) + room) + " " * GAP
        yield line.rstrip()


def bullets(sentences: Iterable[str], width: int, color: bool = False) -> Iterator[str]:
    """The lines of a list of sentences."""
    for sentence in sentences:
        first, *more = folded(sentence, width - GAP)
        yield from (styled(line, "dim" * color) for line in (f"* {first}", *(f"  {line}" for line in more)))


def folded(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns: broken between words, longer words wherever they must."""
    lines = text.split("\n")
    if all(cell_len(line) <= width for line in lines):
        return lines
    return [line.plain.rstrip() for line in Text(text).wrap(_CONSOLE, max(1, width), overflow="fold")]


def styled(text: str, style: str) -> str:
    """Text in one of STYLES; as it is where there is none."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text else text
