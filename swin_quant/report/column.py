"""A table as data: columns say what of a row they show and how; `terminal`, `markdown` and `records` write it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from swin_quant.base.errors import one_line

Row = TypeVar("Row")
Value: TypeAlias = str | int | float | None
BLANK = "-"


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its key for programs, its title for people (none: programs only), its value and how it looks.

    `form` is what str.format makes of the value. `show` replaces it where a cell is more than its value. What there is
    not is a `blank` cell; a column that `may_lack` is left out of tables for people where no row has a value. `fold`:
    its text may be broken where a terminal is narrow. `style`: of a cell on a terminal, as `terminal.STYLES`.
    """

    key: str
    title: str
    of: Callable[[Row], Value]
    form: str = ""
    show: Callable[[Row], str] | None = None
    right: bool = False
    may_lack: bool = False
    fold: bool = False
    blank: str = BLANK
    style: Callable[[Row], str] | None = None

    def value(self, row: Row) -> Value:
        """What was recorded, unrounded; None if it was not. Text is one printable line."""
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
    """Columns, rows, and sentences to stand below them. `style`: of whole rows on a terminal."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    remarks: Sequence[str] = ()
    style: Callable[[Row], str] | None = None


def figure(key: str, title: str, of: Callable[[Row], Value], form: str = "{}", may_lack: bool = False) -> Column[Row]:
    """A column of numbers: to the right, and rounded by `form`."""
    return Column(key, title, of, form, right=True, may_lack=may_lack)


def field(name: str) -> Callable[[object], Value]:
    """The value of a field of a row."""

    def value(row: object) -> Value:
        found: Value = getattr(row, name)
        return found

    return value


def shown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """The columns that a table for people has: titled, and with a value somewhere where they may lack one."""
    return [c for c in columns if c.title and not (c.may_lack and all(c.value(row) is None for row in rows))]
