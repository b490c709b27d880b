"""The facts that `swin-quant doctor` finds on a machine, by topic, each with its remedy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swin_quant.report.printed import Printed
from swin_quant.report.table import NARROW, Column, ReportTable, bullets, field, styled

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

    @property
    def due(self) -> str:
        """The remedy, behind the value that makes it necessary."""
        return "; ".join(filter(None, (self.value if self.state == "caution" else "", self.remedy)))


@dataclass(frozen=True)
class MachineFacts(Printed):
    """All facts; printed, the things to do, then a table for each topic."""

    found: Sequence[MachineFact]

    def show(self, otherwise: int = NARROW) -> None:
        """Print them as wide as the terminal."""
        super().show(otherwise)

    def to_json(self) -> dict[str, Any]:
        """The facts as data."""
        return {"schema": "swin-quant/doctor/1", "found": [asdict(one) for one in self.found]}

    def tables(self) -> list[ReportTable[MachineFact]]:
        topics = dict.fromkeys(one.topic for one in self.found)
        return [
            ReportTable(
                (
                    Column[MachineFact]("state", " ", lambda one: _MARKS[one.state]),
                    Column[MachineFact]("name", topic, field("name")),
                    Column[MachineFact]("value", " ", field("value"), fold=True),
                ),
                [one for one in self.found if one.topic == topic],
                style=lambda one: _STYLES[one.state],
            )
            for topic in topics
        ]

    def text(self, width: int, color: bool = False) -> str:
        due = [f"{one.name}: {one.due}" for one in self.found if one.due]
        head = "What to do, and what else there is" if due else "Nothing stands in the way."
        lines = [styled(head, "bold" * color), *bullets(due, width)]
        return "".join(f"{line}\n" for line in lines) + "\n" + super().text(width, color)
