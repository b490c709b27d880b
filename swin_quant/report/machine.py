"""The facts that `swin-quant doctor` finds on a machine, by topic, each with its remedy."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swin_quant.report.table import (
    Column,
    ReportTable,
    bullets,
    field,
    html_facts,
    html_table,
    print_fitted,
    styled,
    terminal,
)

_MARKS = {"good": "ok", "missing": "-", "caution": "!"}
_STYLES = {"good": "", "missing": "dim", "caution": "yellow"}


@dataclass(frozen=True)
class MachineFact:
    """One fact. `state`: good, missing (absent, and not required) or caution; `remedy`: the way to mend it."""

    topic: str
    name: str
    value: str
    state: str = "good"
    remedy: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """All facts; printed as `swin-quant doctor` prints them."""

    found: Sequence[MachineFact]

    @property
    def cautions(self) -> list[MachineFact]:
        """The facts that cost accuracy or time, or break a script of the user's."""
        return [one for one in self.found if one.state == "caution"]

    def show(self) -> None:
        """Print them as wide as the terminal."""
        print_fitted(self.text, 80)

    def to_json(self) -> dict[str, Any]:
        """The facts as data."""
        return {"schema": "swin-quant/doctor/1", "found": [asdict(one) for one in self.found]}

    def text(self, width: int = 80, color: bool = False) -> str:
        """A paragraph for each thing to do, every topic, and what else can be installed."""
        return "".join(f"{line}\n" for line in self._lines(width, color)).lstrip("\n")

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        due = html_facts("What to do", {one.name: _due(one) for one in self.cautions}) if self.cautions else ""
        return due + "".join(html_table(_table(rows), topic) for topic, rows in self._topics())

    def _topics(self) -> Iterator[tuple[str, list[MachineFact]]]:
        for topic in dict.fromkeys(one.topic for one in self.found):
            yield topic, [one for one in self.found if one.topic == topic]

    def _lines(self, width: int, color: bool) -> Iterator[str]:
        if self.cautions:
            yield from self._remedies("What to do", "caution", width, color)
        else:
            yield styled("Nothing stands in the way.", "bold" * color)
        for topic, rows in self._topics():
            yield from ("", styled(topic, "bold" * color))
            yield from terminal(_table(rows), width, color).splitlines()[1:]
        yield from self._remedies("What else there is", "missing", width, color)

    def _remedies(self, heading: str, state: str, width: int, color: bool) -> Iterator[str]:
        if due := [one for one in self.found if one.state == state and (one.remedy or state == "caution")]:
            yield from ("", styled(heading, "bold" * color))
            yield from bullets((f"{one.name}: {_due(one)}" for one in due), width)


def _due(fact: MachineFact) -> str:
    """The remedy, behind the value that makes it necessary."""
    return "; ".join(filter(None, (fact.value if fact.state == "caution" else "", fact.remedy)))


def _table(rows: Sequence[MachineFact]) -> ReportTable[MachineFact]:
    return ReportTable(_COLUMNS, rows, style=lambda one: _STYLES[one.state])


_COLUMNS: Sequence[Column[MachineFact]] = (
    Column("state", " ", lambda one: _MARKS[one.state]),
    Column("name", " ", field("name")),
    Column("value", " ", field("value"), fold=True),
)
