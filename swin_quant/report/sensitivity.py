"""The tables of a sensitivity: what each group of nodes costs, and the error through the depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swin_quant.cards.costs import GroupRecord, LossRecord, SensitivityRecord
from swin_quant.report.table import Column, ReportTable, Value, comma_separated, field, figure

KINDS = ("role", "stage", "block", "layer", "node")


@dataclass(frozen=True)
class CostRow:
    """A group of nodes, and by how many dB the logits are nearer to the float model's without it (None: endlessly)."""

    group: GroupRecord
    gain_db: float | None

    @property
    def kind(self) -> str:
        return self.group["kind"]

    @property
    def name(self) -> str:
        return self.group["name"]


def _of(which: str, key: str) -> Callable[[CostRow], Value]:
    def value(row: CostRow) -> Value:
        loss: LossRecord = row.group[which]  # type: ignore[literal-required]  # keys of columns, not of users
        found: Value = loss[key]  # type: ignore[literal-required]
        return found

    return value


COLUMNS: tuple[Column[CostRow], ...] = (
    Column("kind", "kind", field("kind")),
    Column("name", "name", field("name"), fold=True),
    figure("nodes", "nodes", lambda row: row.group["nodes"]),
    figure("gain_db", "off wins\ndB", lambda row: row.gain_db, "{:+.2f}"),
    figure("without_sqnr_db", "all but it\nSQNR dB", _of("without", "sqnr_db"), "{:.1f}"),
    figure("without_agreement", "agree %", _of("without", "agreement"), "{:.1f}"),
    figure("without_drop", "", _of("without", "drop")),
    figure("without_kl", "", _of("without", "kl")),
    figure("alone_sqnr_db", "only it\nSQNR dB", _of("alone", "sqnr_db"), "{:.1f}"),
    figure("alone_agreement", "agree %", _of("alone", "agreement"), "{:.1f}"),
    figure("alone_drop", "", _of("alone", "drop")),
    figure("alone_kl", "KL", _of("alone", "kl"), "{:.1e}"),
)

_DEPTH: tuple[Column[tuple[str, float | None]], ...] = (
    Column("block", "output of", lambda row: row[0], fold=True),
    figure("sqnr_db", "SQNR dB", lambda row: row[1], "{:.1f}"),
)


def rows_of(record: SensitivityRecord, kinds: Sequence[str] = KINDS) -> list[CostRow]:
    """Kind by kind, those first that cost most: without which the logits are nearest to the float model's."""
    overall = record["overall"]["sqnr_db"]
    rows = [CostRow(group, _gain(group["without"]["sqnr_db"], overall)) for group in record["groups"]]
    rows = [row for row in rows if row.kind in kinds]
    return sorted(rows, key=lambda row: (kinds.index(row.kind), -_height(row.group["without"]["sqnr_db"])))


def table_of(record: SensitivityRecord, kinds: Sequence[str], top: int | None = None) -> ReportTable[CostRow]:
    """The `top` rows of each kind."""
    rows = rows_of(record, kinds)
    shown = [row for row in rows if [one for one in rows if one.kind == row.kind].index(row) < (top or len(rows))]
    overall = record["overall"]
    sqnr = "equal logits" if overall["sqnr_db"] is None else f"SQNR {overall['sqnr_db']:.1f} dB"
    said = [
        f"{record['policy']}, {record['pictures']} pictures, all nodes on: {sqnr}, agreement "
        f"{overall['agreement']:.1f} %, expected drop of top-1 {overall['drop']:.2f} points, KL {overall['kl']:.1e}",
    ]
    if len(shown) < len(rows):
        said.append(f"{len(shown)} of {len(rows)} rows: those that cost most; CSV and JSON have all")
    return ReportTable(COLUMNS, shown, said)


def profile_of(record: SensitivityRecord) -> ReportTable[tuple[str, float | None]]:
    """SQNR of the output of each block, in their order."""
    return ReportTable(_DEPTH, list(record["profile"].items()))


def profile_as_csv(record: SensitivityRecord) -> str:
    """CSV, a line for each block."""
    return comma_separated(_DEPTH, list(record["profile"].items()))


def as_csv(record: SensitivityRecord, kinds: Sequence[str] = KINDS) -> str:
    """CSV, a line for each group of these kinds."""
    return comma_separated(COLUMNS, rows_of(record, kinds))


def _height(sqnr_db: float | None) -> float:
    return float("inf") if sqnr_db is None else sqnr_db


def _gain(without: float | None, overall: float | None) -> float | None:
    return without - overall if without is not None and overall is not None else None
