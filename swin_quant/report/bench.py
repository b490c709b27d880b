"""The table of a bench: the same rows for a terminal, as Markdown, CSV and JSON."""

from collections.abc import Callable
from dataclasses import asdict

from swin_quant.base.errors import one_line
from swin_quant.report import table as tables
from swin_quant.report.table import Column, ReportTable, comma_separated, field, figure, json_text
from swin_quant.score.bench import BenchReport, BenchRow

SCHEMA = "swin-quant/bench/1"
COLUMNS: tuple[Column[BenchRow], ...] = (
    figure("batch", "batch", field("batch")),
    Column("candidate", "engine, precision, policy", field("candidate")),
    Column("engine", "", field("engine")),
    Column("precision", "", field("precision")),
    Column("policy", "", field("policy")),
    figure("p50_ms", "p50 ms", field("p50_ms"), "{:.2f}"),
    figure("p90_ms", "p90 ms", field("p90_ms"), "{:.2f}"),
    figure("images_per_s", "images/s", field("images_per_s"), "{:.1f}", spare=True),
    Column("calls", "", field("calls")),
    Column("baseline", "", field("baseline")),
    figure("speedup", "x base", field("speedup"), "{:.2f}"),
    figure("peak_mb", "peak MB", field("peak_mb"), "{:.0f}", spare=True),
    Column("before_mb", "", field("before_mb")),
    figure("file_mb", "file MB", field("file_mb"), "{:.1f}", spare=True),
    Column(
        "int8_gemms",
        "int8 GEMMs",
        field("int8_gemms"),
        show=lambda row: f"{row.int8_gemms}/{row.all_gemms}",
        right=True,
    ),
    Column("all_gemms", "", field("all_gemms")),
    figure("sqnr_db", "SQNR dB", field("sqnr_db"), "{:.1f}"),
    figure("agreement", "agree %", field("agreement"), "{:.1f}"),
    figure("acc1", "acc@1", field("acc1"), "{:.2f}", may_lack=True),
    Column("library", "", field("library")),
    Column("failure", "", field("failure")),
)


def table_of(report: BenchReport) -> ReportTable[BenchRow]:
    """The table with its notes; without accuracy if the pictures had no labels."""
    return ReportTable(COLUMNS, report.rows, notes(report))


def notes(report: BenchReport) -> list[str]:
    """The meaning of the figures, and what they were measured with."""
    plan, versions = report.plan, report.versions
    bases = dict.fromkeys(row.baseline for row in report.rows if row.baseline)
    libraries = dict.fromkeys(name for row in report.rows if row.library for name in row.library.split(", "))
    texts = [
        f"{report.name} on {versions.get('cpu')}; threads: {plan.threads}; {plan.rounds} interleaved rounds of "
        f"{plan.seconds:g} s each, a process for each row; torch {versions.get('torch')}"
        + "".join(f", {name}" for name in libraries),
        f"the CPU's int8 instructions: {', '.join(report.int8_features) or 'none known'}; "
        f"bfloat16: {', '.join(report.bfloat16_features) or 'none known'}",
        f"x base: over {', '.join(bases)}, of its own engine; median of the ratios within rounds",
        f"SQNR and agreement: with {report.reference}, on {report.pictures}",
        "peak MB: of the whole process, Python and torch included",
        *report.cautions,
        *(row.failure for row in report.rows if row.failure),
    ]
    return [one_line(note) for note in texts]


def markdown(report: BenchReport) -> str:
    """A pipe table of GitHub's Markdown, and a list of notes."""
    return tables.markdown(table_of(report))


def as_csv(report: BenchReport) -> str:
    """CSV: every field of a row, unrounded."""
    return comma_separated(COLUMNS, report.rows)


def as_json(report: BenchReport) -> str:
    """JSON: the whole report, unrounded, with the type that each matrix product runs in."""
    return json_text({"schema": SCHEMA, **asdict(report)})


FILES: dict[str, Callable[[BenchReport], str]] = {"bench.md": markdown, "bench.csv": as_csv, "bench.json": as_json}
