"""Tables of a plan of the CUDA engine: its launches, equal ones on one line, and the savings of fusions."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swin_quant.backends.cuda.floors import Floor
from swin_quant.backends.cuda.fusions import APART
from swin_quant.backends.cuda.planning import FP16, INT8, PLANNED, CudaPlan
from swin_quant.report.table import (
    Column,
    ReportTable,
    comma_separated,
    escaped,
    field,
    figure,
    folded,
    json_text,
    markdown,
    terminal,
)

ALL = "all"


@dataclass(frozen=True)
class PlanRow:
    """Launches of one size whose names differ in the number of the block alone. `us_of`: their sum, by precision."""

    name: str
    us_of: Mapping[str, float]
    count: int
    floors: Mapping[str, Floor]


@dataclass(frozen=True)
class FusionRow:
    """A choice of fusions in all precisions."""

    name: str
    us_of: Mapping[str, float]
    launches: int
    mb: float
    saves: float


def plan_table(plan: CudaPlan) -> ReportTable[PlanRow]:
    """Every launch, equal ones on one line, and their sum."""
    columns: list[Column[PlanRow]] = [
        Column("name", "launch", field("name"), fold=True),
        figure("count", "n", field("count")),
        figure("mb", "MB each", _of_each(lambda floor: floor.bytes / 1e6), "{:.2f}"),
        figure("gop", "GOP each", _of_each(lambda floor: floor.operations / 1e9 or None), "{:.3f}"),
        *_times(plan, "{:.1f}"),
        Column("bound", "int8 bound", lambda row: row.floors[INT8].bound if row.name != ALL else None, blank=""),
        figure("gain", "at most", _gain, "{:.2f}x"),
    ]
    remarks = [
        f"{PLANNED}: the floors of {plan.model}, batch {plan.batch}, by the peaks of {plan.machine.description} "
        f"({plan.machine.source})",
        "a launch takes at least as long as its bytes (MB each, int8), its products (GOP) and a launch itself "
        f"({plan.machine.gpu.launch_us if plan.machine.gpu else 0:g} µs in a CUDA graph); µs: of all n",
        "at most: fp16 over int8, launch for launch; caches may hold what counts as memory here",
    ]
    return ReportTable(columns, plan_rows(plan), remarks, lambda row: "bold" if row.name == ALL else "")


def fusion_table(plan: CudaPlan) -> ReportTable[FusionRow]:
    """Each choice of fusions with its time."""
    columns: list[Column[FusionRow]] = [
        Column("name", "fusion", field("name"), fold=True),
        figure("launches", "launches", field("launches")),
        figure("mb", "int8 MB", field("mb"), "{:.0f}"),
        *_times(plan, "{:.0f}"),
        figure("saves", "int8 saves", field("saves"), "{:.0%}"),
        figure("gain", "at most", _gain, "{:.2f}x"),
    ]
    return ReportTable(columns, fusion_rows(plan), [f"{PLANNED}; saves: of the sum of floors, each launch apart"])


def plan_rows(plan: CudaPlan) -> list[PlanRow]:
    """Equal launches on one row, in the order of the first; the sum last."""
    found: dict[tuple[str, int], list[Mapping[str, Floor]]] = {}
    for launch in plan.launches:
        name = re.sub(r"blocks\.\d+", "blocks.*", launch.name)
        found.setdefault((name, launch.floors[INT8].bytes), []).append(launch.floors)
    rows = [PlanRow(name, _sums(plan, same), len(same), same[0]) for (name, _), same in found.items()]
    return [*rows, PlanRow(ALL, {p: plan.us(p) for p in plan.precisions}, len(plan.launches), {})]


def fusion_rows(plan: CudaPlan) -> list[FusionRow]:
    """A row for each choice of fusions."""
    rows = []
    apart = next(one.us for one in plan.fusions[INT8] if one.name == APART)
    for same in zip(*plan.fusions.values(), strict=True):
        us = {p: one.us for p, one in zip(plan.precisions, same, strict=True)}
        rows.append(FusionRow(same[0].name, us, same[0].launches, same[0].bytes / 1e6, 1 - us[INT8] / apart))
    return rows


def plan_text(plan: CudaPlan, width: int, color: bool = False) -> str:
    """The plan for a terminal of `width` columns."""
    head = "\n".join(folded(headline(plan), width))
    return f"{head}\n\n{terminal(plan_table(plan), width, color)}\n{terminal(fusion_table(plan), width, color)}"


def headline(plan: CudaPlan) -> str:
    """The plan in a line."""
    ms = ", ".join(f"{p} {plan.us(p) / 1e3:.3f} ms" for p in plan.precisions)
    return (
        f"{PLANNED}: {plan.model}, batch {plan.batch}, {len(plan.launches)} launches: at least {ms}; "
        f"int8 at most {plan.gain:.2f} x fp16"
    )


def plan_markdown(plan: CudaPlan, level: int = 1) -> str:
    """Both tables under a heading."""
    return (
        f"{'#' * level} {escaped(plan.model)}, batch {plan.batch}\n\n{escaped(headline(plan))}.\n\n"
        f"{markdown(plan_table(plan))}\n{markdown(fusion_table(plan))}"
    )


FILES: dict[str, Callable[[CudaPlan], str]] = {
    "plan.md": plan_markdown,
    "plan.csv": lambda plan: comma_separated(plan_table(plan).columns, plan_rows(plan)),
    "plan.json": lambda plan: json_text(plan.to_dict()),
}


def _sums(plan: CudaPlan, same: Sequence[Mapping[str, Floor]]) -> dict[str, float]:
    return {p: sum(floors[p].us for floors in same) for p in plan.precisions}


def _of_each(value: Callable[[Floor], float | None]) -> Callable[[PlanRow], float | None]:
    return lambda row: value(row.floors[INT8]) if row.floors else None


def _times(plan: CudaPlan, form: str) -> list[Column[Any]]:
    def us(precision: str) -> Callable[[PlanRow | FusionRow], float]:
        return lambda row: row.us_of[precision]

    return [figure(f"{p}_us", f"{p} µs", us(p), form) for p in plan.precisions]


def _gain(row: PlanRow | FusionRow) -> float:
    return row.us_of[FP16] / row.us_of[INT8]
