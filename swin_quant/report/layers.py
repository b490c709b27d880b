"""The table of a TensorRT engine's products: what the graph asked for, and what runs."""

from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.report.table import Column, ReportTable, field

COLUMNS: tuple[Column[LayerRow], ...] = (
    Column("name", "product", field("name"), fold=True),
    Column("wanted", "in the graph", field("wanted")),
    Column("ran", "in the engine", field("ran")),
    Column("layer", "layer", field("layer"), fold=True, blank="not found"),
)


def table_of(report: LayerReport) -> ReportTable[LayerRow]:
    """A line for each product; those that are not what the graph asked for stand out."""
    counts = report.counts()
    ran = ", ".join(f"{kind} {number}" for kind, number in counts["ran"].items())
    said = f"products: {ran}; {counts['reformats']} of {counts['layers']} layers only reformat"
    return ReportTable(COLUMNS, report.rows, [said], style=lambda row: "" if row.wanted == row.ran else "yellow")
