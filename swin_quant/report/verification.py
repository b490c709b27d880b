"""Tables on an artifact: the distance of its logits from its checkpoint's, the types of its products in TensorRT."""

from collections.abc import Sequence

from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.cards.records import VerificationRecord
from swin_quant.report.table import Column, ReportTable, field, figure
from swin_quant.score.difference import INT8_LEVELS

_STYLES = {"pass": "green", "FAIL": "red", None: ""}


def _verdict(record: VerificationRecord) -> str | None:
    return None if record["passed"] is None else "pass" if record["passed"] else "FAIL"


def _products(record: VerificationRecord) -> str | None:
    """How many of the quantized products run in int8, as 48/63."""
    return f"{record['int8_products']}/{record['quantized_products']}" if record.get("quantized_products") else None


COLUMNS: tuple[Column[VerificationRecord], ...] = (
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


def table_of(records: Sequence[VerificationRecord]) -> ReportTable[VerificationRecord]:
    """A line for each engine and reference."""
    pictures, scale = records[0]["pictures"], f"amax / {INT8_LEVELS}"
    if "cosine" in records[0]:
        remark = f"|Δ| on {pictures} pictures, in units of the reference's mean magnitude; step: of int8, {scale}"
    else:
        remark = f"|Δlogit| on {pictures} pictures; step: of int8 over the reference's logits, {scale}"
    return ReportTable(COLUMNS, records, [remark])


def products_table(report: LayerReport) -> ReportTable[LayerRow]:
    """The products of a TensorRT engine, a line each, coloured if not in the graph's type."""
    counts = report.counts()
    ran = ", ".join(f"{kind} {number}" for kind, number in counts["ran"].items())
    remark = f"products: {ran}; {counts['reformats']} of {counts['layers']} layers only reformat"
    return ReportTable(_OF_TENSORRT, report.rows, [remark], style=lambda row: "" if row.wanted == row.ran else "yellow")
