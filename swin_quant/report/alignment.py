"""The table of an alignment: a line for each tensor, then the first that differs, in words."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from swin_quant.base.files import finite
from swin_quant.report.table import Column, ReportTable, field, figure, records
from swin_quant.score.alignment import Aligned, Differences


def _db(row: Aligned) -> str:
    return "equal" if row.sqnr_db == math.inf else f"{row.sqnr_db:.1f}"


def _known(name: str) -> Any:
    def value(row: Aligned) -> float | None:
        found: float = getattr(row, name)
        return None if math.isnan(found) else found

    return value


COLUMNS: tuple[Column[Aligned], ...] = (
    Column("group", "group", field("group")),
    Column("name", "tensor", field("name"), fold=True),
    figure("max", "max |Δ|", _known("max"), "{:.3g}"),
    figure("mean", "mean |Δ|", _known("mean"), "{:.3g}"),
    figure("cosine", "cosine", _known("cosine"), "{:.6f}"),
    Column("sqnr_db", "SQNR dB", _known("sqnr_db"), show=_db, right=True),
    Column("problem", "problem", field("problem"), may_lack=True),
)


def table_of(found: Differences, only: Sequence[str] = ()) -> ReportTable[Aligned]:
    """A line for each tensor that both sides have; with `only`, for those whose name matches one of its patterns."""
    rows = [row for row in found.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only)]
    return ReportTable(COLUMNS, rows, remarks(found), lambda row: "red" if row is found.first else "")


def remarks(found: Differences) -> list[str]:
    """Sentences on the two sides, the first tensor that differs, and the tensor at which the SQNR falls most."""
    remarks = [f"A: {found.a}; B: {found.b}; {found.pictures} pictures; SQNR of B against A"]
    first, drop = found.first, found.drop
    if first is None:
        remarks.append(f"no tensor of {len(found.rows)} is below {found.below:g} dB")
    else:
        why = first.problem or f"{_db(first)} dB, below {found.below:g}"
        remarks.append(f"first divergence: {first.group}/{first.name} ({why})")
    if drop:
        remarks.append(f"largest fall: at {drop[1].name}, from {_db(drop[0])} to {_db(drop[1])} dB")
    if any(found.only):
        remarks.append(f"not compared: {found.only[0]} tensors that only A shows, {found.only[1]} that only B does")
    return remarks


def as_data(found: Differences) -> dict[str, Any]:
    """The comparison for JSON: all rows, and the facts of `remarks` by key."""
    first, drop = found.first, found.drop
    return finite(
        {
            "schema": "swin-quant/alignment/1",
            "a": found.a,
            "b": found.b,
            "pictures": found.pictures,
            "below_db": found.below,
            "first": f"{first.group}/{first.name}" if first else None,
            "largest_fall": drop[1].name if drop else None,
            "fall_from_db": drop[0].sqnr_db if drop else None,
            "tensors": records(COLUMNS, found.rows),
        }
    )
