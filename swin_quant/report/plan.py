"""Tables of a plan of the CUDA engine: its launches, by floors or as estimated from kernels, and what fusions save."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swin_quant.backends.cuda.estimates import REACHED
from swin_quant.backends.cuda.floors import Floor
from swin_quant.backends.cuda.fusions import APART
from swin_quant.backends.cuda.planning import ESTIMATED, FP16, INT8, PLANNED, CudaPlan, StaticLaunch, StaticPlan
from swin_quant.base.files import json_text
from swin_quant.report.table import (
    Column,
    ReportTable,
    comma_separated,
    escaped,
    field,
    figure,
    folded,
    markdown,
    terminal,
)

ALL = "all"


Launch = TypeVar("Launch")


def _alike(launches: Iterable[tuple[str, float, Launch]]) -> list[tuple[str, list[Launch]]]:
    """Launches of one size whose names differ in the number of the block alone, in the order of the first."""
    found: dict[tuple[str, float], list[Launch]] = {}
    for name, size, launch in launches:
        found.setdefault((re.sub(r"blocks\.\d+", "blocks.*", name), size), []).append(launch)
    return [(name, same) for (name, _), same in found.items()]


def _text(headline: str, tables: Iterable[ReportTable[Any]], width: int, color: bool) -> str:
    return "\n".join(folded(headline, width)) + "\n\n" + "\n".join(terminal(one, width, color) for one in tables)


def _markdown(plan: CudaPlan | StaticPlan, headline: str, tables: Iterable[ReportTable[Any]]) -> str:
    title = f"# {escaped(plan.model)}, batch {plan.batch}\n\n{escaped(headline)}.\n\n"
    return title + "\n".join(map(markdown, tables))


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
    alike = _alike((one.name, one.floors[INT8].bytes, one.floors) for one in plan.launches)
    rows = [PlanRow(name, _sums(plan, same), len(same), same[0]) for name, same in alike]
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
    return _text(headline(plan), (plan_table(plan), fusion_table(plan)), width, color)


def headline(plan: CudaPlan) -> str:
    """The plan in a line."""
    ms = ", ".join(f"{p} {plan.us(p) / 1e3:.3f} ms" for p in plan.precisions)
    return (
        f"{PLANNED}: {plan.model}, batch {plan.batch}, {len(plan.launches)} launches: at least {ms}; "
        f"int8 at most {plan.gain:.2f} x fp16"
    )


PLAN_FILES: dict[str, Callable[[CudaPlan], str]] = {
    "plan.md": lambda plan: _markdown(plan, headline(plan), (plan_table(plan), fusion_table(plan))),
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


SHOWN = "issue", "alu", "special", "loads", "chain"  # bounds with a column for people


@dataclass(frozen=True)
class StaticRow:
    """Launches of one size whose names differ in the number of the block alone; `same` is empty for the sum."""

    precision: str
    name: str
    same: tuple[StaticLaunch, ...]
    sums: tuple[StaticLaunch, ...]

    def of_all(self, value: Callable[[StaticLaunch], float]) -> float:
        """The sum of a value over the row's launches."""
        return sum(value(one) for one in self.sums)


def static_rows(plan: StaticPlan, precision: str) -> list[StaticRow]:
    """Equal launches on one row, in the order of the first; the sum last."""
    alike = _alike((one.launch.name, one.estimate.us, one) for one in plan.launches[precision])
    rows = [StaticRow(precision, name, tuple(same), tuple(same)) for name, same in alike]
    return [*rows, StaticRow(precision, ALL, (), tuple(plan.launches[precision]))]


def static_table(plan: StaticPlan, precision: str) -> ReportTable[StaticRow]:
    """Every launch of a precision, equal ones on one line, and their sum."""
    return ReportTable(
        static_columns(),
        static_rows(plan, precision),
        [f"{precision}: µs of all n; the bounds at their full rates, the estimate at the rates that kernels reach"],
        lambda row: "bold" if row.name == ALL else "",
    )


def static_columns() -> list[Column[StaticRow]]:
    """Columns for people; columns without a title are for programs."""
    return [
        Column("precision", "", field("precision")),
        Column("name", "launch", field("name"), fold=True),
        Column("kernel", "", _one(lambda one: one.launch.op)),
        figure("count", "n", lambda row: len(row.sums)),
        figure("programs", "", _one(lambda one: one.estimate.programs)),
        figure("resident", "", _one(lambda one: one.estimate.resident)),
        figure("waves", "", _one(lambda one: one.estimate.waves)),
        figure("registers", "", _one(lambda one: one.counts.registers)),
        figure("shared", "", _one(lambda one: one.counts.shared)),
        figure("floor", "floor", lambda row: row.of_all(lambda one: one.floor.us), "{:.0f}"),
        *(figure(name, name if name in SHOWN else "", _bound(name), "{:.0f}") for name in REACHED),
        figure("us", "µs", lambda row: row.of_all(lambda one: one.estimate.us), "{:.1f}"),
        Column("low", "range", lambda row: row.of_all(lambda one: one.estimate.low), show=_range, right=True),
        figure("high", "", lambda row: row.of_all(lambda one: one.estimate.high)),
        Column("bound", "bound", _one(lambda one: one.estimate.bound), blank=""),
    ]


def static_headline(plan: StaticPlan) -> str:
    """The plan in a line."""
    sums = {precision: plan.us(precision) for precision in plan.launches}
    ms = ", ".join(
        f"{p} {us / 1e3:.2f} ms ({low / 1e3:.2f} to {high / 1e3:.2f})" for p, (us, low, high) in sums.items()
    )
    gain = f"; int8 {sums[FP16][0] / sums[INT8][0]:.2f} x as fast as fp16" if {FP16, INT8} <= sums.keys() else ""
    return (
        f"{ESTIMATED}: {plan.model}, batch {plan.batch}, {plan.machine.description}, triton {plan.triton}: {ms}{gain}"
    )


def static_text(plan: StaticPlan, width: int, color: bool = False) -> str:
    """The plan for a terminal of `width` columns."""
    return _text(static_headline(plan), _static_tables(plan), width, color)


def _static_tables(plan: StaticPlan) -> list[ReportTable[StaticRow]]:
    return [static_table(plan, precision) for precision in plan.launches]


STATIC_FILES: dict[str, Callable[[StaticPlan], str]] = {
    "static.md": lambda plan: _markdown(plan, static_headline(plan), _static_tables(plan)),
    "static.csv": lambda plan: comma_separated(
        static_columns(), [row for p in plan.launches for row in static_rows(plan, p)]
    ),
    "static.json": lambda plan: json_text(plan.to_dict()),
}


def _range(row: StaticRow) -> str:
    return f"{row.of_all(lambda one: one.estimate.low):.0f} to {row.of_all(lambda one: one.estimate.high):.0f}"


def _one(value: Callable[[StaticLaunch], str | float]) -> Callable[[StaticRow], str | float | None]:
    return lambda row: value(row.same[0]) if row.same else None


def _bound(name: str) -> Callable[[StaticRow], float]:
    return lambda row: row.of_all(lambda one: one.estimate.bounds[name])
