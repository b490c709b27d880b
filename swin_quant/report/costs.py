"""Tables of the cost of quantization: by group of nodes, by block, and for the policies that a search tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import listed
from swin_quant.base.files import finite
from swin_quant.cards.costs import GroupRecord, SensitivityRecord
from swin_quant.quant.names import GROUP_KINDS
from swin_quant.quant.search import SearchResult, TriedPolicy
from swin_quant.report.table import Column, ReportTable, comma_separated, field, figure, records


@dataclass(frozen=True)
class CostRow:
    """A group of nodes; `gain_db`: the rise of the logits' SQNR without it, None if it is infinite."""

    group: GroupRecord
    gain_db: float | None

    @property
    def kind(self) -> str:
        return self.group["kind"]

    @property
    def name(self) -> str:
        return self.group["name"]


COSTS: tuple[Column[CostRow], ...] = (
    Column("kind", "kind", field("kind")),
    Column("name", "name", field("name"), fold=True),
    figure("nodes", "nodes", field("group", "nodes")),
    figure("gain_db", "off wins\ndB", field("gain_db"), "{:+.2f}"),
    figure("without_sqnr_db", "all but it\nSQNR dB", field("group", "without", "sqnr_db"), "{:.1f}"),
    figure("without_agreement", "agree %", field("group", "without", "agreement"), "{:.1f}"),
    figure("without_drop", "", field("group", "without", "drop")),
    figure("without_kl", "", field("group", "without", "kl")),
    figure("alone_sqnr_db", "only it\nSQNR dB", field("group", "alone", "sqnr_db"), "{:.1f}"),
    figure("alone_agreement", "agree %", field("group", "alone", "agreement"), "{:.1f}"),
    figure("alone_drop", "", field("group", "alone", "drop")),
    figure("alone_kl", "KL", field("group", "alone", "kl"), "{:.1e}"),
)
_DEPTH: tuple[Column[tuple[str, float | None]], ...] = (
    Column("block", "output of", lambda row: row[0], fold=True),
    figure("sqnr_db", "SQNR dB", lambda row: row[1], "{:.1f}"),
)
_TRIED: tuple[Column[TriedPolicy], ...] = (
    Column("policy", "policy", field("policy"), show=lambda row: row.policy.replace(" layers ", " "), fold=True),
    figure("nodes", "nodes", field("nodes")),
    figure("ms", "ms", field("ms"), "{:.3f}", may_lack=True),
    figure("sqnr_db", "SQNR dB", field("loss", "sqnr_db"), "{:.1f}"),
    figure("agreement", "agree", field("loss", "agreement"), "{:.2f}"),
    figure("drop", "drop", field("loss", "drop"), "{:.3f}"),
    figure("drop_error", "±", field("loss", "drop_error"), "{:.3f}"),
    Column("kl", "", field("loss", "kl")),
    Column("front", "", lambda row: "found" if row.is_found else "front" if row.on_front else "", blank=""),
)


def rows_of(record: SensitivityRecord, kinds: Sequence[str] = GROUP_KINDS) -> list[CostRow]:
    """The groups by kind, the costliest first: without it the logits are nearest to the float model's."""
    overall = record["overall"]["sqnr_db"]
    rows = [CostRow(group, _gain(group["without"]["sqnr_db"], overall)) for group in record["groups"]]
    rows = [row for row in rows if row.kind in kinds]
    return sorted(rows, key=lambda row: (kinds.index(row.kind), -_height(row.group["without"]["sqnr_db"])))


def sensitivity_table(record: SensitivityRecord, kinds: Sequence[str], top: int | None = None) -> ReportTable[CostRow]:
    """The `top` rows of each kind."""
    rows = rows_of(record, kinds)
    shown = [row for row in rows if [one for one in rows if one.kind == row.kind].index(row) < (top or len(rows))]
    overall = record["overall"]
    sqnr = "equal logits" if overall["sqnr_db"] is None else f"SQNR {overall['sqnr_db']:.1f} dB"
    remarks = [
        f"{record['policy']}, {record['pictures']} pictures, all nodes on: {sqnr}, agreement "
        f"{overall['agreement']:.1f} %, expected drop of top-1 {overall['drop']:.2f} points, KL {overall['kl']:.1e}",
    ]
    if len(shown) < len(rows):
        remarks.append(f"{len(shown)} of {len(rows)} rows: those that cost most; CSV and JSON have all")
    return ReportTable(COSTS, shown, remarks)


def profile_table(record: SensitivityRecord) -> ReportTable[tuple[str, float | None]]:
    """The SQNR of each block's output, in the order of the blocks."""
    return ReportTable(_DEPTH, list(record["profile"].items()))


def profile_csv(record: SensitivityRecord) -> str:
    """A line for each block."""
    return comma_separated(_DEPTH, list(record["profile"].items()))


def sensitivity_csv(record: SensitivityRecord, kinds: Sequence[str] = GROUP_KINDS) -> str:
    """A line for each group of these kinds."""
    return comma_separated(COSTS, rows_of(record, kinds))


def _height(sqnr_db: float | None) -> float:
    return float("inf") if sqnr_db is None else sqnr_db


def _gain(without: float | None, overall: float | None) -> float | None:
    return without - overall if without is not None and overall is not None else None


def search_table(result: SearchResult, budget: str, what: str) -> ReportTable[TriedPolicy]:
    """A line for each policy that was measured."""
    timed = any(one.ms is not None for one in result.candidates)
    better = "is faster" if timed else "leaves fewer nodes float"
    remarks = [
        f"{what}; agreement in %, expected drop of top-1 ± its error, against float32 on {result.pictures} pictures; "
        f"front: none {better} and as near",
        f"budget: {budget}: {'met' if result.met else 'NOT met; this is the best that was found'}",
    ]
    if not timed:
        remarks.append("no latency was measured: the kernels of this engine do not run here")
    if layers := [f"{unit.name} ({unit.sqnr_db:.1f} dB alone)" for unit in result.left_float]:
        remarks.append(f"float: {listed(layers)}; that costs {result.cost_ms:+.3f} ms (each in {result.file})")
    style = {True: "bold", False: ""}
    return ReportTable(_TRIED, result.candidates, remarks, style=lambda row: style[row.is_found])


def search_data(result: SearchResult) -> dict[str, Any]:
    """For JSON: the policy's file, whether it met the budget, the layers that it leaves float, the candidates."""
    layers = [
        {"layer": unit.name, "sqnr_db": finite(unit.sqnr_db), "saved_ms": unit.saved_ms} for unit in result.left_float
    ]
    return {
        "policy": str(result.file),
        "met": result.met,
        "pictures": result.pictures,
        "left_float": layers,
        "cost_ms": result.cost_ms,
        "candidates": records(_TRIED, result.candidates),
    }
