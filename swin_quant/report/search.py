"""The table of a search for a policy: what was measured, by time."""

from swin_quant.base.errors import listed
from swin_quant.base.files import finite
from swin_quant.quant.search import SearchResult, TriedPolicy
from swin_quant.report.table import Column, ReportTable, field, figure, json_text, records

COLUMNS: tuple[Column[TriedPolicy], ...] = (
    Column("policy", "policy", field("policy"), fold=True),
    figure("nodes", "nodes on", field("nodes")),
    figure("ms", "ms", field("ms"), "{:.3f}", may_lack=True),
    figure("sqnr_db", "SQNR dB", lambda row: row.loss.sqnr_db, "{:.1f}"),
    figure("agreement", "agree %", lambda row: row.loss.agreement, "{:.2f}"),
    figure("drop", "expected\ndrop", lambda row: row.loss.drop, "{:.3f}"),
    figure("drop_error", "±", lambda row: row.loss.drop_error, "{:.3f}"),
    figure("kl", "KL", lambda row: row.loss.kl, "{:.1e}"),
    Column("front", "", lambda row: "found" if row.is_found else "front" if row.on_front else "", blank=""),
)


def table_of(result: SearchResult, budget: str, what: str) -> ReportTable[TriedPolicy]:
    """A line for each policy that was measured."""
    timed = any(one.ms is not None for one in result.candidates)
    better = "is faster" if timed else "leaves fewer nodes float"
    said = [
        f"{what}; loss on {result.pictures} pictures, against the model in float32; front: none {better} and as near",
        f"budget: {budget}: {'met' if result.met else 'NOT met; this is the best that was found'}",
    ]
    if not timed:
        said.append("no latency was measured: the kernels of this engine do not run here")
    if layers := [f"{unit.name} ({unit.sqnr_db:.1f} dB alone)" for unit in result.left_float]:
        said.append(f"float: {listed(layers)}; that costs {result.cost_ms:+.3f} ms (each in {result.file})")
    style = {True: "bold", False: ""}
    return ReportTable(COLUMNS, result.candidates, said, style=lambda row: style[row.is_found])


def as_json(result: SearchResult) -> str:
    """JSON: the policy's file, whether the budget was met, which layers it leaves float, and the candidates."""
    rows = records(COLUMNS, result.candidates)
    layers = [
        {"layer": unit.name, "sqnr_db": finite(unit.sqnr_db), "saved_ms": unit.saved_ms} for unit in result.left_float
    ]
    return json_text(
        {"policy": str(result.file), "met": result.met, "pictures": result.pictures, "left_float": layers,
         "cost_ms": result.cost_ms, "candidates": rows}
    )  # fmt: skip
