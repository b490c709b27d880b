"""Tables of a static plan: a network's launches on a GPU as estimated from compiled kernels."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from swin_quant.backends.cuda.estimates import REACHED
from swin_quant.backends.cuda.planning import FP16, INT8
from swin_quant.backends.cuda.static_planning import ESTIMATED, StaticLaunch, StaticPlan
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
    found: dict[tuple[str, float], list[StaticLaunch]] = {}
    for one in plan.launches[precision]:
        name = re.sub(r"blocks\.\d+", "blocks.*", one.launch.name)
        found.setdefault((name, one.estimate.us), []).append(one)
    rows = [StaticRow(precision, name, tuple(same), tuple(same)) for (name, _), same in found.items()]
    return [*rows, StaticRow(precision, ALL, (), tuple(plan.launches[precision]))]


def static_table(plan: StaticPlan, precision: str) -> ReportTable[StaticRow]:
    """Every launch of a precision, equal ones on one line, and their sum."""
    return ReportTable(
        columns(),
        static_rows(plan, precision),
        [f"{precision}: µs of all n; the bounds at their full rates, the estimate at the rates that kernels reach"],
        lambda row: "bold" if row.name == ALL else "",
    )


def columns() -> list[Column[StaticRow]]:
    """Columns for people; those without a title are for programs."""
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
    tables = "\n".join(terminal(static_table(plan, precision), width, color) for precision in plan.launches)
    return "\n".join(folded(static_headline(plan), width)) + f"\n\n{tables}"


def static_markdown(plan: StaticPlan) -> str:
    """All tables under a heading."""
    tables = "\n".join(markdown(static_table(plan, precision)) for precision in plan.launches)
    return f"# {escaped(plan.model)}, batch {plan.batch}\n\n{escaped(static_headline(plan))}.\n\n{tables}"


FILES: dict[str, Callable[[StaticPlan], str]] = {
    "static.md": static_markdown,
    "static.csv": lambda plan: comma_separated(columns(), [row for p in plan.launches for row in static_rows(plan, p)]),
    "static.json": lambda plan: json_text(plan.to_dict()),
}


def _range(row: StaticRow) -> str:
    return f"{row.of_all(lambda one: one.estimate.low):.0f} to {row.of_all(lambda one: one.estimate.high):.0f}"


def _one(value: Callable[[StaticLaunch], str | float]) -> Callable[[StaticRow], str | float | None]:
    return lambda row: value(row.same[0]) if row.same else None


def _bound(name: str) -> Callable[[StaticRow], float]:
    return lambda row: row.of_all(lambda one: one.estimate.bounds[name])
