"""A table as data, and every form that it is written in: terminal, Markdown, HTML, CSV, JSON.

Columns say which value of a row they show and how. Text for people is rounded; CSV and JSON have every value unrounded.
"""

import csv
import html
import io
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from swin_quant.base.errors import one_line

Row = TypeVar("Row")
Value: TypeAlias = str | int | float | None
BLANK = "-"
GAP = 2  # spaces between columns on a terminal
NARROW, WIDE = 80, 140  # columns of text for a file or a pipe, which have no width
_NARROWEST = 10  # no word is broken into less
_CONSOLE = Console(file=None, width=80)
_RIGHT, _LEFT = "text-align: right", "text-align: left"
# The styles of cells and rows: ANSI code, CSS. A browser without one of its functions shows the usual colour.
STYLES = {
    "bold": (1, "font-weight: bold"),
    "dim": (2, "color: color-mix(in srgb, currentColor 65%, transparent)"),
    "red": (31, "color: light-dark(#b00, #ff7b72)"),
    "green": (32, "color: light-dark(#080, #56d364)"),
    "yellow": (33, "color: light-dark(#850, #e3b341)"),
}


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its key for programs, its title for people (empty: programs only), its value and its look.

    `form` formats the value by str.format; `show` replaces it where a cell shows more than its value. A missing value
    is shown as `blank`; a column that `may_lack` values is left out for people where no row has one. `fold`: a narrow
    terminal may break its text. `spare`: one that is too narrow has no such column. `style`: one of STYLES for a cell.
    """

    key: str
    title: str
    of: Callable[[Row], Value]
    form: str = ""
    show: Callable[[Row], str] | None = None
    right: bool = False
    may_lack: bool = False
    fold: bool = False
    spare: bool = False
    blank: str = BLANK
    style: Callable[[Row], str] | None = None

    def value(self, row: Row) -> Value:
        """The recorded value, unrounded; None where there is none. Text is one printable line."""
        value = self.of(row)
        return one_line(value) if isinstance(value, str) else value

    def cell(self, row: Row) -> str:
        """The value as people read it."""
        value = self.value(row)
        if value is None or value == "":
            return self.blank
        if self.show:
            return self.show(row)
        return self.form.format(value) if self.form else str(value)


@dataclass(frozen=True)
class ReportTable(Generic[Row]):
    """Columns, rows, and remarks below them. `style` gives one of STYLES for a whole row."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    remarks: Sequence[str] = ()
    style: Callable[[Row], str] | None = None


def figure(
    key: str, title: str, of: Callable[[Row], Value], form: str = "{}", may_lack: bool = False, spare: bool = False
) -> Column[Row]:
    """A column of numbers, aligned to the right and rounded by `form`."""
    return Column(key, title, of, form, right=True, may_lack=may_lack, spare=spare)


def field(*names: str) -> Callable[[Any], Value]:
    """A function that reads a field of a row, or a field of a field: attributes or keys. None has no fields."""

    def value(row: Any) -> Value:
        for name in names:
            row = None if row is None else row[name] if isinstance(row, Mapping) else getattr(row, name)
        found: Value = row
        return found

    return value


def shown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """The columns of a table for people: all that have a title, but optional ones that no row has."""
    return [c for c in columns if c.title and not (c.may_lack and all(c.value(row) is None for row in rows))]


def terminal(table: ReportTable[Row], width: int, color: bool = False) -> str:
    """The table and its remarks for a terminal of `width` columns, with ANSI styles if `color`.

    Figures are never cut or folded: a narrow terminal leaves out spare columns, then folds names, then wraps lines.
    """
    everything = shown(table.columns, table.rows)
    columns = list(everything)
    for column in reversed(everything):
        if column.spare and total(compute_widths(columns, table.rows)) > width:
            columns.remove(column)
    lines = grid(columns, table.rows, compute_widths(columns, table.rows, width), color, style=table.style)
    left_out = [column.title for column in everything if column not in columns]
    more = [f"a wider terminal shows {', '.join(left_out)}"] if left_out else []
    return "".join(f"{line}\n" for line in (*lines, *bullets([*table.remarks, *more], width, color)))


def compute_widths(columns: Sequence[Column[Row]], rows: Iterable[Row], width: int | None = None) -> list[int]:
    """The width that each column needs. All are narrowed until they fit into `width`, if they can: titles and columns
    that may fold between words at first, then such columns inside words."""
    rows = list(rows)
    widths: list[int] = []
    whole: list[int] = []
    for column in columns:
        titles, cells = column.title.split("\n"), [line for row in rows for line in column.cell(row).split("\n")]
        foldable, rest = (titles + cells, []) if column.fold else (titles, cells)
        widths.append(max(map(cell_len, titles + cells)))
        whole.append(max(map(cell_len, [word for text in foldable for word in text.split()] + rest), default=0))
    broken = [min(_NARROWEST, least) if column.fold else least for column, least in zip(columns, whole, strict=True)]
    for least in (whole, broken):
        while width is not None and total(widths) > width:
            wide = [index for index, narrowest in enumerate(least) if widths[index] > narrowest]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def total(widths: Sequence[int]) -> int:
    """The width of columns side by side."""
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
    titles = [folded(column.title, width) for column, width in zip(columns, widths, strict=True)]
    height = max(map(len, titles), default=0)
    padded = [[""] * (height - len(title)) + title for title in titles]
    yield from _side_by_side(padded, columns, widths, ["bold" * color] * len(columns))
    if rule:
        yield "─" * total(widths)
    for row in rows:
        cells = [folded(column.cell(row), width) for column, width in zip(columns, widths, strict=True)]
        row_style = style(row) if style and color else ""
        styles = [(color and column.style and column.style(row)) or row_style for column in columns]
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
    """Lines of at most `width` columns, broken between words; a longer word is broken behind a mark, such as a dot."""
    lines = text.split("\n")
    if all(cell_len(line) <= width for line in lines):
        return lines
    text = re.sub(r"\S+", lambda word: _broken(word[0], width), text)
    return [line.plain.rstrip() for line in Text(text).wrap(_CONSOLE, max(1, width), overflow="fold")]


def _broken(word: str, width: int) -> str:
    end = max(word.rfind(mark, 0, width) for mark in "./_-") + 1
    return f"{word[:end]}\n{_broken(word[end:], width)}" if len(word) > width < 2 * end else word


def styled(text: str, style: str) -> str:
    """Text in one of STYLES for a terminal; unchanged if `style` is empty."""
    return f"\x1b[{STYLES[style][0]}m{text}\x1b[0m" if style and text else text


def screen_width(otherwise: int = WIDE) -> int:
    """The columns of the terminal; `otherwise` if standard output is none."""
    return shutil.get_terminal_size((otherwise, 0)).columns


def has_colors() -> bool:
    """Whether to write ANSI styles (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def print_text(text: str) -> None:
    """Print to standard output; a character that its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def print_fitted(text: Callable[[int, bool], str], otherwise: int = WIDE) -> None:
    """Print a text that is made as wide as the terminal, with ANSI styles if it has colours."""
    print_text(text(screen_width(otherwise), has_colors()))


def markdown(table: ReportTable[Row]) -> str:
    """A pipe table of GitHub's Markdown, and a list of the remarks."""
    columns = shown(table.columns, table.rows)
    lines = [[column.title for column in columns], ["---:" if column.right else "---" for column in columns]]
    for row in table.rows:
        lines.append([escaped(c.cell(row)) if isinstance(c.value(row), str) else c.cell(row) for c in columns])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "\n" + "".join(f"* {escaped(remark)}\n" for remark in table.remarks)


def escaped(text: str) -> str:
    """Text that Markdown shows unchanged; underscores inside words need no backslash and stay readable."""
    text = re.sub(r"[\\`*~\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(text, quote=False))
    return text.replace("|", "&#124;").replace("\n", " ")  # parsers differ on a backslash before a pipe


def html_table(table: ReportTable[Row], heading: str = "") -> str:
    """An optional heading, a <table>, and a list of the remarks. Text is escaped."""
    columns = shown(table.columns, table.rows)
    titles = [column.title for column in columns]
    heads = [(column.title, _RIGHT if column.right else _LEFT) for column in columns]
    lines = [_html_line("th", heads)] if any(title.strip() for title in titles) else []
    for row in table.rows:
        cells = []
        for column in columns:
            place = f"{_RIGHT}; white-space: nowrap" if column.right else _LEFT  # a figure such as 1e-07 stays whole
            styles = (table.style(row) if table.style else "", column.style(row) if column.style else "")
            cells.append((column.cell(row), "; ".join((place, *(STYLES[style][1] for style in styles if style)))))
        lines.append(_html_line("td", cells, titles))
    items = "".join(f"<li>{_html_text(remark)}</li>" for remark in table.remarks)
    head = f"<p><b>{_html_text(heading)}</b></p>" if heading else ""
    below = f"<ul>{items}</ul>" if items else ""
    return f"<div>{head}<table>{''.join(lines)}</table>{below}</div>"


def html_facts(heading: str, facts: Mapping[str, Value]) -> str:
    """A table of two columns, names and values; a fact without a value is left out."""
    columns: tuple[Column[tuple[str, Value]], ...] = (
        Column("what", " ", lambda fact: fact[0], style=lambda _: "dim"),
        Column("value", " ", lambda fact: fact[1]),
    )
    return html_table(ReportTable(columns, [fact for fact in facts.items() if fact[1] not in (None, "")]), heading)


def _html_line(tag: str, cells: list[tuple[str, str]], titles: Sequence[str] = ()) -> str:
    """A row. Each of its cells has its column's title, which a narrow screen shows beside it."""
    said = [f' data-title="{html.escape(title)}"' if title.strip() else "" for title in titles] or [""] * len(cells)
    both = zip(said, cells, strict=True)
    parts = (f'<{tag}{title} style="{css}">{_html_text(cell)}</{tag}>' for title, (cell, css) in both)
    return f"<tr>{''.join(parts)}</tr>"


def _html_text(text: str) -> str:
    """Escaped; a flag stays on one line, which a browser would break behind its first dash."""
    whole = r'<span style="white-space: nowrap">\g<0></span>'
    return re.sub(r"(?<!\S)--[a-z][\w-]*", whole, html.escape(text)).replace("\n", "<br>")


def comma_separated(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """CSV (RFC 4180): keys, then values; a missing value is empty."""
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow([column.key for column in columns])
    for row in rows:
        values = [column.value(row) for column in columns]
        # Text that a spreadsheet would take for a formula is quoted
        is_formula = [isinstance(value, str) and value.startswith(("=", "+", "-", "@")) for value in values]
        writer.writerow([f"'{value}" if bad else value for value, bad in zip(values, is_formula, strict=True)])
    return output.getvalue()


def records(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[dict[str, Value]]:
    """A mapping for each row; a missing value is None."""
    return [{column.key: column.value(row) for column in columns} for row in rows]


class Printed(ABC):
    """A result that Python prints as its tables, 80 columns wide, and a notebook shows as HTML.

    `in_pipe`: the columns of text where standard output is no terminal.
    """

    in_pipe: ClassVar[int] = WIDE

    @abstractmethod
    def tables(self) -> Sequence[ReportTable[Any]]:
        """The tables of the result, in order."""

    def show(self) -> None:
        """Print the tables as wide as the terminal."""
        print_fitted(self.text, self.in_pipe)

    def text(self, width: int, color: bool = False) -> str:
        """The tables for a terminal of `width` columns."""
        return "\n".join(terminal(one, width, color) for one in self.tables())

    def __str__(self) -> str:
        return self.text(NARROW)

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self.tables()))
