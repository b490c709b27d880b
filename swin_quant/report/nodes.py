"""Tables of nodes and policies: a model's nodes, a policy's rules, what each node costs, what a search tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.registry import targets
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.cards.records import GroupRecord, SensitivityRecord, TriedPolicies, TriedRecord
from swin_quant.quant import GROUP_KINDS
from swin_quant.quant.policy import Policy
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.ranges import get_range
from swin_quant.quant.watch import watching
from swin_quant.report.table import (
    NARROW,
    Column,
    Printed,
    ReportTable,
    field,
    figure,
    folded,
    print_text,
    records,
    screen_width,
)
from swin_quant.report.verdict import DeployVerdict


@dataclass(frozen=True)
class NodeRow:
    """One node. `amax`: the largest in effect, None without one; `shape` of the tensor for one picture.

    `bounds`: both ends of a range with a zero point; None if it is symmetric, or not calibrated.
    """

    name: str
    role: str
    enabled: bool
    format: str
    bits: int
    per_channel: bool
    block: int | None
    symmetric: bool
    amax: float | None
    bounds: Sequence[float] | None
    shape: tuple[int, ...]


def list_nodes(model: nn.Module, input_shape: Sequence[int]) -> list[NodeRow]:
    """Rows in module order, from one forward pass of zeros with `input_shape`; works on meta tensors."""
    nodes = named_nodes(model)
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, node: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes[name] = tuple(inputs[0].shape)

    with torch.inference_mode(), watching(nodes, record):
        model(torch.zeros(*input_shape, device=next(model.parameters()).device))
    rows = []
    for name, node in nodes.items():
        amax = None if node.amax is None else get_range(node).amax
        one = node.setting
        bounds = None if node.bounds is None or one.symmetric else node.bounds.tolist()
        how = (one.enabled, one.format, one.bits, one.per_channel, one.block, one.symmetric)
        rows.append(NodeRow(name, node.role.value, *how, amax, bounds, shapes[name]))
    return rows


NODES: tuple[Column[NodeRow], ...] = (
    Column("node", "node", field("name"), fold=True),
    Column("role", "role", field("role"), spare=True),
    Column("state", "state", lambda row: "on" if row.enabled else "off"),
    Column("format", "format", field("format"), spare=True),
    Column("bits", "bits", field("bits")),
    Column(
        "granularity",
        "granularity",
        lambda row: f"blocks of {row.block}" if row.block else "per-channel" if row.per_channel else "per-tensor",
        spare=True,
    ),
    Column("grid", "grid", lambda row: "symmetric" if row.symmetric else "zero point", spare=True),
    Column("amax", "amax", field("amax"), "{:.6g}"),
    Column("low", "low", lambda row: row.bounds[0] if row.bounds else None, "{:.6g}", may_lack=True, spare=True),
    Column("high", "high", lambda row: row.bounds[1] if row.bounds else None, "{:.6g}", may_lack=True, spare=True),
    Column("shape", "shape", lambda row: "x".join(map(str, row.shape)), spare=True),
)


@dataclass(frozen=True)
class Nodes(Printed):
    """The nodes of a model, in its order; printed, a line for each, dimmed where it is off."""

    rows: Sequence[NodeRow]

    def tables(self) -> list[ReportTable[NodeRow]]:
        remark = f"{sum(row.enabled for row in self.rows)} of {len(self.rows)} nodes are on"
        return [ReportTable(NODES, self.rows, [remark], style=lambda row: "" if row.enabled else "dim")]

    def to_json(self) -> list[dict[str, Any]]:
        """A record for each node."""
        return records(NODES, self.rows)


@dataclass(frozen=True)
class PolicyList:
    """Policies; printed, the backends that take each and its purpose."""

    policies: Sequence[Policy]

    def show(self) -> None:
        """Print them as wide as the terminal."""
        for policy, taken in zip(self.policies, self._backends(), strict=True):
            print(policy.name + (f"  (for {', '.join(taken)})" if taken else ""))
            for line in folded(" ".join(policy.description.split()), screen_width(NARROW) - 4):
                print("    " + line)

    def to_json(self) -> list[dict[str, Any]]:
        """Each policy with the backends that take it."""
        return [{**one.to_dict(), "for": taken} for one, taken in zip(self.policies, self._backends(), strict=True)]

    def _backends(self) -> list[list[str]]:
        able = {name: backend.exporting.policies for name, backend in targets().items()}
        return [[name for name, taken in able.items() if policy.name in taken] for policy in self.policies]


@dataclass(frozen=True)
class CostRow:
    """A group of nodes; `gain_db`: the rise of the logits' SQNR without it, None if it is infinite."""

    group: GroupRecord
    gain_db: float | None

    @property
    def name(self) -> str:
        return self.group["name"]


COSTS: tuple[Column[CostRow], ...] = (
    Column("kind", "kind", field("group", "kind")),
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
_TRIED: tuple[Column[TriedRecord], ...] = (
    Column("policy", "policy", field("policy"), fold=True),
    figure("nodes", "nodes", field("nodes")),
    figure("ms", "ms", field("ms"), "{:.3f}", may_lack=True),
    figure("sqnr_db", "SQNR dB", field("loss", "sqnr_db"), "{:.1f}"),
    figure("agreement", "agree", field("loss", "agreement"), "{:.2f}"),
    figure("drop", "drop", field("loss", "drop"), "{:.3f}"),
    figure("drop_error", "±", field("loss", "drop_error"), "{:.3f}"),
    Column("kl", "", field("loss", "kl")),
    Column("front", "", lambda row: "found" if row["found"] else "front" if row["front"] else "", blank=""),
)


PROFILE = "profile"


@dataclass(frozen=True)
class Costs(Printed):
    """The costs of every node and group; printed, it is the table of `swin-quant sensitivity`.

    `kinds`: those that are printed (empty: all); `top`: the rows of each.
    """

    record: SensitivityRecord
    kinds: Sequence[str] = ()
    top: int | None = 8

    def rows(self, kind: str = "node") -> list[CostRow]:
        """The groups of a kind (role, stage, block, layer, node), the costliest first: without it the logits are
        nearest to the float model's."""
        overall, rows = self.record["overall"]["sqnr_db"], list[CostRow]()
        for group in (group for group in self.record["groups"] if group["kind"] == kind):
            without = group["without"]["sqnr_db"]
            rows.append(CostRow(group, None if without is None or overall is None else without - overall))
        return sorted(rows, key=lambda row: -_height(row.group["without"]["sqnr_db"]))

    def to_json(self) -> SensitivityRecord:
        """The record, as in the run card."""
        return self.record

    def tables(self) -> list[ReportTable[Any]]:
        record, overall, tables = self.record, self.record["overall"], list[ReportTable[Any]]()
        if kinds := [kind for kind in self.kinds or GROUP_KINDS if kind != PROFILE]:
            rows = [self.rows(kind) for kind in kinds]
            shown = [row for some in rows for row in some[: self.top]]
            sqnr = "equal logits" if overall["sqnr_db"] is None else f"SQNR {overall['sqnr_db']:.1f} dB"
            remarks = [
                f"{record['policy']}, {record['pictures']} pictures, all nodes on: {sqnr}, agreement "
                f"{overall['agreement']:.1f} %, expected drop of top-1 {overall['drop']:.2f} points, KL "
                f"{overall['kl']:.1e}",
            ]
            if len(shown) < sum(map(len, rows)):
                remarks.append(f"{len(shown)} of {sum(map(len, rows))} rows: those that cost most; JSON has all")
            tables.append(ReportTable(COSTS, shown, remarks))
        if PROFILE in self.kinds if self.kinds else record["profile"]:  # the output of each block, in order
            tables.append(ReportTable(_DEPTH, list(record["profile"].items())))
        return tables


def _height(sqnr_db: float | None) -> float:
    return float("inf") if sqnr_db is None else sqnr_db


@dataclass(frozen=True)
class Search(Printed):
    """The result of a search; false where the budget cannot be met. Printed, it is the table of `swin-quant search`.

    `policy`: the fastest within the budget, or the best there was; its `file` says why each of its layers stays float.
    `record`: all measurements, as the run card holds them. `verdict`: what to deploy, and the command that exports it.
    """

    policy: Policy
    file: Path
    record: TriedPolicies
    verdict: DeployVerdict

    @property
    def unmet(self) -> str:
        """Say that no policy keeps the limits, not even this one."""
        return f"the budget cannot be met ({self.record['budget']}): the best that was found is {self.file}"

    def __bool__(self) -> bool:
        return self.record["met"]

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.verdict._repr_html_()

    def show(self) -> None:
        """Print the table and the verdict."""
        super().show()
        print_text("\n" + self.verdict.text(screen_width(NARROW)))

    def to_json(self) -> dict[str, Any]:
        """The policy's file, whether it met the budget, the layers left float, the candidates, the verdict."""
        kept = {key: self.record[key] for key in ("met", "pictures", "left_float", "cost_ms")}
        found = {"policy": str(self.file), **kept, "candidates": records(_TRIED, self.record["tried"])}
        return found | {"verdicts": [self.verdict.to_dict()]}

    def check(self) -> None:
        """SwinQuantError where the budget cannot be met."""
        if not self:
            raise SwinQuantError(self.unmet)

    def tables(self) -> list[ReportTable[TriedRecord]]:
        record = self.record
        remarks = [
            f"{record['engine']}, batch {record['batch']}; agreement in %, expected drop of top-1 ± its error, against "
            f"float32 on {record['pictures']} pictures; front: no other policy is as near to float and is faster",
            f"budget: {record['budget']}: {'met' if record['met'] else 'NOT met; this is the best that was found'}",
        ]
        if layers := [f"{one['layer']} ({_height(one['sqnr_db']):.1f} dB alone)" for one in record["left_float"]]:
            remarks.append(f"float: {listed(layers)}; that costs {record['cost_ms']:+.3f} ms (each in {self.file})")
        return [ReportTable(_TRIED, record["tried"], remarks, style=lambda row: "bold" * row["found"])]
