"""The results of `show`: policies, nodes, the products of an ONNX file, GEMMs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swin_quant.backends.fastertransformer.tuner import TunedGemm
from swin_quant.backends.onnx_reader.npu_rules import NPUS, Misfit
from swin_quant.backends.onnx_reader.products import Inspection
from swin_quant.backends.registry import targets
from swin_quant.quant.policy import Policy
from swin_quant.report.graph import IntegerProducts, inspection_text
from swin_quant.report.nodes import NodeRow, nodes_table
from swin_quant.report.printed import Printed
from swin_quant.report.table import NARROW, Column, ReportTable, field, folded, print_fitted, records, screen_width


@dataclass(frozen=True)
class PolicyList:
    """Policies; printed, the backends that take each and its purpose."""

    policies: Sequence[Policy]

    def show(self) -> None:
        """Print them as wide as the terminal."""
        indent = " " * 4
        for policy in self.policies:
            taken = self._backends(policy)
            print(policy.name + (f"  (for {', '.join(taken)})" if taken else ""))
            for line in folded(" ".join(policy.description.split()), screen_width(NARROW) - len(indent)):
                print(indent + line)

    def to_json(self) -> list[dict[str, Any]]:
        """Each policy with the backends that take it."""
        return [{**policy.to_dict(), "for": self._backends(policy)} for policy in self.policies]

    def _backends(self, policy: Policy) -> list[str]:
        return [name for name, backend in targets().items() if policy.name in backend.exporting.policies]


@dataclass(frozen=True)
class Nodes(Printed):
    """The nodes of a model, in its order."""

    rows: Sequence[NodeRow]

    def tables(self) -> list[ReportTable[NodeRow]]:
        return [nodes_table(self.rows)]

    def to_json(self) -> list[dict[str, Any]]:
        """A record for each node."""
        return records(self.tables()[0].columns, self.rows)


@dataclass(frozen=True)
class GraphReport:
    """The products of an ONNX file, and how many run in int8 on each engine."""

    file: Path
    report: Inspection
    engines: Mapping[str, IntegerProducts]
    npu: str | None = None
    misfits: Sequence[Misfit] = ()

    def show(self) -> None:
        """Print it as wide as the terminal; for an NPU, whether the file keeps its rules and which nodes do not."""
        if self.npu:
            rules, count = NPUS[self.npu], len(self.misfits)
            print(f"{self.npu} ({rules.what}): {f'{count} nodes do not fit' if count else 'fits'}")
            print(*self.misfits, *(f"source: {one}" for one in rules.sources), sep="\n")
            return
        print_fitted(partial(inspection_text, self.report, engines=self.engines))

    def to_json(self) -> dict[str, Any]:
        """The inspection, with the counts by engine."""
        counts = {name: asdict(one) for name, one in self.engines.items()}
        found = {"file": self.file.name, **self.report.to_dict(), "engines": counts}
        if self.npu:
            misfits = [asdict(one) for one in self.misfits]
            found["npu"] = {"for": self.npu, **asdict(NPUS[self.npu]), "misfits": misfits}
        return found


@dataclass(frozen=True)
class GemmRow:
    """A GEMM, with the algorithm of FasterTransformer's tuner, if one is known, and its time."""

    gemm: TunedGemm
    algorithm: int | None = None
    ms: float | None = None


_GEMMS: tuple[Column[GemmRow], ...] = (
    *(Column(name, name, field("gemm", name)) for name in ("stage", "layer", "m", "n", "k")),
    Column("algorithm", "algorithm", field("algorithm"), blank="not tuned"),
    Column("ms", "ms", field("ms"), "{:g}", may_lack=True),
)


@dataclass(frozen=True)
class Gemms(Printed):
    """The int8 GEMMs of a model and batch, with the entries of tuner files."""

    rows: Sequence[GemmRow]

    def tables(self) -> list[ReportTable[GemmRow]]:
        remark = f"{len(self.rows)} shapes, {sum(row.ms is not None for row in self.rows)} tuned"
        return [ReportTable(_GEMMS, self.rows, [remark])]

    def to_json(self) -> list[dict[str, Any]]:
        """A record for each GEMM."""
        return records(_GEMMS, self.rows)
