"""The table of a model's quantizer nodes."""

from collections.abc import Sequence

from swin_quant.quant.listing import NodeRow
from swin_quant.report.table import Column, ReportTable, comma_separated, field, json_text, records


def _granularity(row: NodeRow) -> str:
    return f"blocks of {row.block}" if row.block else "per-channel" if row.per_channel else "per-tensor"


COLUMNS: tuple[Column[NodeRow], ...] = (
    Column("node", "node", field("name"), fold=True),
    Column("role", "role", field("role"), spare=True),
    Column("state", "state", lambda row: "on" if row.enabled else "off"),
    Column("format", "format", field("format"), spare=True),
    Column("bits", "bits", field("bits")),
    Column("granularity", "granularity", _granularity, spare=True),
    Column("grid", "grid", lambda row: "symmetric" if row.symmetric else "zero point", spare=True),
    Column("amax", "amax", field("amax"), "{:.6g}"),
    Column("low", "low", lambda row: row.bounds[0] if row.bounds else None, "{:.6g}", may_lack=True, spare=True),
    Column("high", "high", lambda row: row.bounds[1] if row.bounds else None, "{:.6g}", may_lack=True, spare=True),
    Column("shape", "shape", lambda row: "x".join(map(str, row.shape)), spare=True),
)


def table_of(rows: Sequence[NodeRow]) -> ReportTable[NodeRow]:
    """A line for each node; nodes that are off are dimmed."""
    remark = f"{sum(row.enabled for row in rows)} of {len(rows)} nodes are on"
    return ReportTable(COLUMNS, rows, [remark], style=lambda row: "" if row.enabled else "dim")


def as_csv(rows: Sequence[NodeRow]) -> str:
    """CSV, a line for each node."""
    return comma_separated(COLUMNS, rows)


def as_json(rows: Sequence[NodeRow]) -> str:
    """JSON, an object for each node."""
    return json_text(records(COLUMNS, rows))
