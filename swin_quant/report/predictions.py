"""The table of predictions: the most probable classes of each picture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swin_quant.report.table import Column, ReportTable, field, figure


@dataclass(frozen=True)
class AnswerRow:
    """A class of a picture and its probability in percent; the name of the `picture` stands beside its first."""

    picture: str | None
    percent: float
    index: int
    name: str


COLUMNS: tuple[Column[AnswerRow], ...] = (
    Column("picture", "picture", field("picture"), fold=True, blank=""),
    figure("percent", "%", field("percent"), "{:.2f}"),
    figure("index", "index", field("index")),
    Column("class", "class", field("name"), fold=True),
)


def table_of(answers: Mapping[str, Iterable[tuple[float, int, str]]], by: str) -> ReportTable[AnswerRow]:
    """The classes of each picture as (probability, index, name), best first; `by` names the model."""
    rows = [
        AnswerRow(None if rank else picture, 100 * probability, index, name)
        for picture, best in answers.items()
        for rank, (probability, index, name) in enumerate(best)
    ]
    return ReportTable(COLUMNS, rows, [by], style=lambda row: "" if row.picture else "dim")
