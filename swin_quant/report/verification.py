"""The table of a verification: how far each engine's logits are from those of its checkpoint."""

from collections.abc import Callable, Sequence

from swin_quant.cards.records import VerificationRecord
from swin_quant.report.table import Column, ReportTable, Value, figure
from swin_quant.score.difference import INT8_LEVELS

_STYLES = {"pass": "green", "FAIL": "red", None: ""}


def _of(key: str) -> Callable[[VerificationRecord], Value]:
    def value(record: VerificationRecord) -> Value:
        found: Value = record[key]  # type: ignore[literal-required]  # keys of columns, not of users
        return found

    return value


def _verdict(record: VerificationRecord) -> str | None:
    return None if record["passed"] is None else "pass" if record["passed"] else "FAIL"


COLUMNS: tuple[Column[VerificationRecord], ...] = (
    Column("engine", "engine", _of("engine")),
    Column("precision", "type", _of("precision")),
    Column("reference", "against", _of("reference")),
    figure("mean", "mean", _of("mean"), "{:.5f}"),
    figure("max", "max", _of("max"), "{:.5f}"),
    figure("steps", "max/step", lambda record: record["max"] / record["step"] if record["step"] else None, "{:.2f}"),
    figure("agreement", "agree %", _of("agreement"), "{:.2f}"),
    figure("cosine", "cosine", lambda record: record.get("cosine"), "{:.5f}"),
    figure("sqnr_db", "SQNR dB", _of("sqnr_db"), "{:.1f}"),
    figure("tolerance", "limit", _of("tolerance"), "{:g}"),
    Column("passed", "verdict", _verdict, blank="", style=lambda record: _STYLES[_verdict(record)]),
)


def table_of(records: Sequence[VerificationRecord]) -> ReportTable[VerificationRecord]:
    """A line for each engine and reference."""
    pictures, scale = records[0]["pictures"], f"amax / {INT8_LEVELS}"
    if "cosine" in records[0]:
        said = f"|Δ| on {pictures} pictures, in units of the reference's mean magnitude; step: of int8, {scale}"
        return ReportTable(COLUMNS, records, [said])
    said = f"|Δlogit| on {pictures} pictures; step: of int8 over the reference's logits, {scale}"
    return ReportTable(COLUMNS, records, [said])
