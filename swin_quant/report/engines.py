"""Tables of engines: their distance from a checkpoint or from each other, the classes that they find."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.base.files import finite
from swin_quant.cards.records import VerificationRecord
from swin_quant.report.table import Column, ReportTable, field, figure, records
from swin_quant.score.alignment import Aligned, Differences
from swin_quant.score.difference import INT8_LEVELS

_STYLES = {"pass": "green", "FAIL": "red", None: ""}


def _verdict(record: VerificationRecord) -> str | None:
    return None if record["passed"] is None else "pass" if record["passed"] else "FAIL"


def _products(record: VerificationRecord) -> str | None:
    """How many of the quantized products run in int8, as 48/63."""
    return f"{record['int8_products']}/{record['quantized_products']}" if record.get("quantized_products") else None


VERIFICATION: tuple[Column[VerificationRecord], ...] = (
    Column("engine", "engine", field("engine")),
    Column("precision", "type", field("precision")),
    Column("reference", "against", field("reference")),
    figure("mean", "mean", field("mean"), "{:.5f}"),
    figure("max", "max", field("max"), "{:.5f}"),
    figure(
        "steps",
        "max/step",
        lambda record: record["max"] / record["step"] if record["step"] else None,
        "{:.2f}",
        spare=True,
    ),
    figure("agreement", "agree %", field("agreement"), "{:.2f}"),
    figure("cosine", "cosine", lambda record: record.get("cosine"), "{:.5f}", spare=True),
    figure("sqnr_db", "SQNR dB", field("sqnr_db"), "{:.1f}"),
    figure("tolerance", "limit", field("tolerance"), "{:g}"),
    Column("int8_products", "int8", _products, may_lack=True, spare=True),
    Column("passed", "verdict", _verdict, blank="", style=lambda record: _STYLES[_verdict(record)]),
)
_OF_TENSORRT: tuple[Column[LayerRow], ...] = (
    Column("name", "product", field("name"), fold=True),
    Column("wanted", "in the graph", field("wanted")),
    Column("ran", "in the engine", field("ran")),
    Column("layer", "layer", field("layer"), fold=True, blank="not found"),
)


def verification_table(records: Sequence[VerificationRecord]) -> ReportTable[VerificationRecord]:
    """A line for each engine and reference."""
    pictures, scale = records[0]["pictures"], f"amax / {INT8_LEVELS}"
    if "cosine" in records[0]:
        remark = f"|Δ| on {pictures} pictures, in units of the reference's mean magnitude; step: of int8, {scale}"
    else:
        remark = f"|Δlogit| on {pictures} pictures; max/step: in int8 steps over the reference's logits, {scale}"
    return ReportTable(VERIFICATION, records, [remark])


def products_table(report: LayerReport) -> ReportTable[LayerRow]:
    """The products of a TensorRT engine, a line each, coloured if not in the graph's type."""
    counts = report.counts()
    ran = ", ".join(f"{kind} {number}" for kind, number in counts["ran"].items())
    remark = f"products: {ran}; {counts['reformats']} of {counts['layers']} layers only reformat"
    return ReportTable(_OF_TENSORRT, report.rows, [remark], style=lambda row: "" if row.wanted == row.ran else "yellow")


def _db(row: Aligned) -> str:
    return "equal" if row.sqnr_db == math.inf else f"{row.sqnr_db:.1f}"


def _known(name: str) -> Any:
    def value(row: Aligned) -> float | None:
        found: float = getattr(row, name)
        return None if math.isnan(found) else found

    return value


ALIGNMENT: tuple[Column[Aligned], ...] = (
    Column("group", "group", field("group")),
    Column("name", "tensor", field("name"), fold=True),
    figure("max", "max |Δ|", _known("max"), "{:.3g}"),
    figure("mean", "mean |Δ|", _known("mean"), "{:.3g}"),
    figure("cosine", "cosine", _known("cosine"), "{:.6f}"),
    Column("sqnr_db", "SQNR dB", _known("sqnr_db"), show=_db, right=True),
    Column("problem", "problem", field("problem"), may_lack=True),
)


def alignment_table(found: Differences, only: Sequence[str] = ()) -> ReportTable[Aligned]:
    """A line for each tensor that both sides have; with `only`, for each whose name matches one of its patterns."""
    rows = [row for row in found.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only)]
    return ReportTable(ALIGNMENT, rows, alignment_remarks(found), lambda row: "red" if row is found.first else "")


def alignment_remarks(found: Differences) -> list[str]:
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


def alignment_data(found: Differences) -> dict[str, Any]:
    """The comparison for JSON: all rows, and the facts of `alignment_remarks` by key."""
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
            "tensors": records(ALIGNMENT, found.rows),
        }
    )


@dataclass(frozen=True)
class AnswerRow:
    """A class of a picture and its probability in percent; the name of the `picture` stands beside its first."""

    picture: str | None
    percent: float
    index: int
    name: str


PREDICTIONS: tuple[Column[AnswerRow], ...] = (
    Column("picture", "picture", field("picture"), fold=True, blank=""),
    figure("percent", "%", field("percent"), "{:.2f}"),
    figure("index", "index", field("index")),
    Column("class", "class", field("name"), fold=True),
)


def predictions_table(answers: Mapping[str, Iterable[tuple[float, int, str]]], by: str) -> ReportTable[AnswerRow]:
    """The classes of each picture as (probability, index, name), best first; `by` names the model."""
    rows = [
        AnswerRow(None if rank else picture, 100 * probability, index, name)
        for picture, best in answers.items()
        for rank, (probability, index, name) in enumerate(best)
    ]
    return ReportTable(PREDICTIONS, rows, [by], style=lambda row: "" if row.picture else "dim")
