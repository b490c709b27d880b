"""The table of a bench for a terminal, as Markdown, CSV and JSON: the same rows, rounded for people only."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from rich.console import Console
from rich.table import Table

from swin_quant.base.files import finite
from swin_quant.bench.measure import BenchReport, BenchRow

SCHEMA = "swin-quant/bench/1"


@dataclass(frozen=True)
class Column:
    """A heading, and what people read under it; figures to the right."""

    title: str
    show: Callable[[BenchRow], str]
    right: bool = True


def _figure(name: str, form: str) -> Callable[[BenchRow], str]:
    def show(row: BenchRow) -> str:
        value = getattr(row, name)
        return "-" if value is None else form.format(value)

    return show


def _gemms(row: BenchRow) -> str:
    return "-" if row.int8_gemms is None else f"{row.int8_gemms}/{row.all_gemms}"


COLUMNS = (
    Column("batch", _figure("batch", "{}")),
    Column("engine, precision, policy", lambda row: row.contender, right=False),
    Column("p50 ms", _figure("p50_ms", "{:.2f}")),
    Column("p90 ms", _figure("p90_ms", "{:.2f}")),
    Column("images/s", _figure("images_per_s", "{:.1f}")),
    Column("x base", _figure("speedup", "{:.2f}")),
    Column("peak MB", _figure("peak_mb", "{:.0f}")),
    Column("file MB", _figure("file_mb", "{:.1f}")),
    Column("int8 GEMMs", _gemms),
    Column("SQNR dB", _figure("sqnr_db", "{:.1f}")),
    Column("agree %", _figure("agreement", "{:.1f}")),
    Column("acc@1", _figure("acc1", "{:.2f}")),
)


def columns_of(report: BenchReport) -> list[Column]:
    """Without accuracy where the pictures had no labels."""
    labelled = any(row.acc1 is not None for row in report.rows)
    return [column for column in COLUMNS if labelled or column.title != "acc@1"]


def notes(report: BenchReport) -> list[str]:
    """What the figures mean and were measured with."""
    plan, versions = report.plan, report.versions
    bases = dict.fromkeys(row.baseline for row in report.rows if row.baseline)
    libraries = dict.fromkeys(row.library for row in report.rows if row.library)
    said = [
        f"{report.name} on {versions.get('cpu')}; threads: {plan.threads}; {plan.rounds} interleaved rounds of "
        f"{plan.seconds:g} s each, a process for each row; torch {versions.get('torch')}"
        + "".join(f", {name}" for name in libraries),
        f"the CPU's int8 instructions: {', '.join(report.int8_features) or 'none known'}; "
        f"bfloat16: {', '.join(report.bfloat16_features) or 'none known'}",
        f"x base: over {', '.join(bases)}, of its own engine; median of the ratios within rounds",
        f"SQNR and agreement: with {report.reference}, on {report.pictures}",
        "peak MB: of the whole process, Python and torch included",
    ]
    return said + report.cautions + [row.failure for row in report.rows if row.failure]


def terminal(report: BenchReport, width: int = 140, color: bool = False) -> str:
    """A table for people, a rule between batches, then the notes."""
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=color, legacy_windows=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = columns_of(report)
    for column in columns:
        side = "right" if column.right else "left"
        table.add_column(column.title, justify=side, overflow="fold", no_wrap=not column.right)
    for index, row in enumerate(report.rows):
        last = index + 1 < len(report.rows) and report.rows[index + 1].batch != row.batch
        table.add_row(*(column.show(row) for column in columns), end_section=last)
    console.print(table)
    for note in notes(report):
        console.print(f"* {note}", style="dim", markup=False, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def markdown(report: BenchReport) -> str:
    """A pipe table of GitHub's Markdown, and a list of notes."""
    columns = columns_of(report)
    lines = [
        [column.title for column in columns],
        ["---:" if column.right else "---" for column in columns],
        *([_escaped(column.show(row)) for column in columns] for row in report.rows),
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "\n" + "".join(f"* {_escaped(note)}\n" for note in notes(report))


def comma_separated(report: BenchReport) -> str:
    """CSV: every field of a row, unrounded, empty where nothing was measured."""
    output = io.StringIO()
    writer = csv.DictWriter(output, [field.name for field in fields(BenchRow)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in report.rows)
    return output.getvalue()


def as_json(report: BenchReport) -> str:
    """JSON: everything, unrounded, with the type that each matrix product runs in."""
    return json.dumps(finite({"schema": SCHEMA, **asdict(report)}), indent=2, allow_nan=False) + "\n"


FILES: dict[str, Callable[[BenchReport], str]] = {
    "bench.md": markdown,
    "bench.csv": comma_separated,
    "bench.json": as_json,
}


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;").replace("\n", " ").replace("*", "\\*")
