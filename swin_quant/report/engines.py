"""Tables of engines: their latency, their distance from a checkpoint or from each other, the classes that they find."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from swin_quant.backends.tensorrt.layers import LayerReport, LayerRow
from swin_quant.base.errors import one_line
from swin_quant.base.files import finite, json_text
from swin_quant.cards.records import VerificationRecord
from swin_quant.report.table import Column, ReportTable, comma_separated, field, figure, markdown, records
from swin_quant.score.alignment import Aligned, Differences
from swin_quant.score.bench import BenchReport, BenchRow
from swin_quant.score.difference import INT8_LEVELS

SCHEMA = "swin-quant/bench/1"
BENCH: tuple[Column[BenchRow], ...] = (
    figure("batch", "batch", field("batch")),
    Column("candidate", "engine, precision, policy", field("candidate"), fold=True),
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


def bench_table(report: BenchReport) -> ReportTable[BenchRow]:
    """The table with its bench_notes; without accuracy if the pictures had no labels."""
    return ReportTable(BENCH, report.rows, bench_notes(report))


def bench_notes(report: BenchReport) -> list[str]:
    """The meaning of the figures, and the conditions they were measured under."""
    plan, versions = report.plan, report.versions
    bases = dict.fromkeys(row.baseline for row in report.rows if row.baseline)
    libraries = dict.fromkeys(name for row in report.rows if row.library for name in row.library.split(", "))
    texts = [
        f"{report.name} on {versions.get('cpu')}; threads: {plan.threads}; {plan.rounds} interleaved rounds of "
        f"{plan.seconds:g} s each, a process for each row; torch {versions.get('torch')}"
        + "".join(f", {name}" for name in libraries),
        f"the CPU's int8 instructions: {', '.join(report.int8_features) or 'none known'}; "
        f"bfloat16: {', '.join(report.bfloat16_features) or 'none known'}",
        *([f"x base: over {', '.join(bases)}, of its own engine; median of the ratios within rounds"] if bases else []),
        f"SQNR and agreement: with {report.reference}, on {report.pictures}",
        "int8 GEMMs: of the engine's own products; those inside compiled operators are not counted",
        "peak MB: of the whole process, Python and torch included",
        *report.cautions,
        *(row.failure for row in report.rows if row.failure),
    ]
    return [one_line(note) for note in texts]


def bench_data(report: BenchReport) -> dict[str, Any]:
    """The whole report for JSON, unrounded, with the type that each matrix product runs in."""
    return {"schema": SCHEMA, **asdict(report)}


BENCH_FILES: dict[str, Callable[[BenchReport], str]] = {
    "bench.md": lambda report: markdown(bench_table(report)),
    "bench.csv": lambda report: comma_separated(BENCH, report.rows),
    "bench.json": lambda report: json_text(bench_data(report)),
}


_STYLES = {"pass": "green", "FAIL": "red", None: ""}


def _verdict(record: VerificationRecord) -> str | None:
    return None if record["passed"] is None else "pass" if record["passed"] else "FAIL"


def _products(record: VerificationRecord) -> str | None:
    """How many of the quantized products run in int8, as 48/63."""
    return f"{record['int8_products']}/{record['quantized_products']}" if record.get("quantized_products") else None


VERIFICATION: tuple[Column[VerificationRecord], ...] = (
    Column("engine", "engine", field("engine")),
    Column("precision", "type", field("precision")),
    Column("reference", "against", field("reference")),
    figure("mean", "mean", field("mean"), "{:.5f}"),
    figure("max", "max", field("max"), "{:.5f}"),
    figure(
        "steps",
        "max/step",
        lambda record: record["max"] / record["step"] if record["step"] else None,
        "{:.2f}",
        spare=True,
    ),
    figure("agreement", "agree %", field("agreement"), "{:.2f}"),
    figure("cosine", "cosine", lambda record: record.get("cosine"), "{:.5f}", spare=True),
    figure("sqnr_db", "SQNR dB", field("sqnr_db"), "{:.1f}"),
    figure("tolerance", "limit", field("tolerance"), "{:g}"),
    Column("int8_products", "int8", _products, may_lack=True, spare=True),
    Column("passed", "verdict", _verdict, blank="", style=lambda record: _STYLES[_verdict(record)]),
)
_OF_TENSORRT: tuple[Column[LayerRow], ...] = (
    Column("name", "product", field("name"), fold=True),
    Column("wanted", "in the graph", field("wanted")),
    Column("ran", "in the engine", field("ran")),
    Column("layer", "layer", field("layer"), fold=True, blank="not found"),
)


def verification_table(records: Sequence[VerificationRecord]) -> ReportTable[VerificationRecord]:
    """A line for each engine and reference."""
    pictures, scale = records[0]["pictures"], f"amax / {INT8_LEVELS}"
    if "cosine" in records[0]:
        remark = f"|Δ| on {pictures} pictures, in units of the reference's mean magnitude; step: of int8, {scale}"
    else:
        remark = f"|Δlogit| on {pictures} pictures; max/step: in int8 steps over the reference's logits, {scale}"
    return ReportTable(VERIFICATION, records, [remark])


def products_table(report: LayerReport) -> ReportTable[LayerRow]:
    """The products of a TensorRT engine, a line each, coloured if not in the graph's type."""
    counts = report.counts()
    ran = ", ".join(f"{kind} {number}" for kind, number in counts["ran"].items())
    remark = f"products: {ran}; {counts['reformats']} of {counts['layers']} layers only reformat"
    return ReportTable(_OF_TENSORRT, report.rows, [remark], style=lambda row: "" if row.wanted == row.ran else "yellow")


def _db(row: Aligned) -> str:
    return "equal" if row.sqnr_db == math.inf else f"{row.sqnr_db:.1f}"


def _known(name: str) -> Any:
    def value(row: Aligned) -> float | None:
        found: float = getattr(row, name)
        return None if math.isnan(found) else found

    return value


ALIGNMENT: tuple[Column[Aligned], ...] = (
    Column("group", "group", field("group")),
    Column("name", "tensor", field("name"), fold=True),
    figure("max", "max |Δ|", _known("max"), "{:.3g}"),
    figure("mean", "mean |Δ|", _known("mean"), "{:.3g}"),
    figure("cosine", "cosine", _known("cosine"), "{:.6f}"),
    Column("sqnr_db", "SQNR dB", _known("sqnr_db"), show=_db, right=True),
    Column("problem", "problem", field("problem"), may_lack=True),
)


def alignment_table(found: Differences, only: Sequence[str] = ()) -> ReportTable[Aligned]:
    """A line for each tensor that both sides have; with `only`, for each whose name matches one of its patterns."""
    rows = [row for row in found.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only)]
    return ReportTable(ALIGNMENT, rows, alignment_remarks(found), lambda row: "red" if row is found.first else "")


def alignment_remarks(found: Differences) -> list[str]:
    """Sentences on the two sides, the first tensor that differs, and the tensor at which the SQNR falls most."""
    remarks = [f"A: {found.a}; B: {found.b}; {found.pictures} pictures; SQNR of B against A"]
    first, drop = found.first, found.drop
    if first is None:
        remarks.append(f"no tensor of {len(found.rows)} is below {found.below:g} dB")
    else:
        why = first.problem or f"{_db(first)} dB, below {found.below:g}"
        remarks.append(f"first divergence: {first.group}/{first.name} ({why})")
    if drop:
        remarks.append(f"largest fall: at {drop[1].name}, from {_db(drop[0])} to {_db(drop[1])} dB")
    if any(found.only):
        remarks.append(f"not compared: {found.only[0]} tensors that only A shows, {found.only[1]} that only B does")
    return remarks


def alignment_data(found: Differences) -> dict[str, Any]:
    """The comparison for JSON: all rows, and the facts of `alignment_remarks` by key."""
    first, drop = found.first, found.drop
    return finite(
        {
            "schema": "swin-quant/alignment/1",
            "a": found.a,
            "b": found.b,
            "pictures": found.pictures,
            "below_db": found.below,
            "first": f"{first.group}/{first.name}" if first else None,
            "largest_fall": drop[1].name if drop else None,
            "fall_from_db": drop[0].sqnr_db if drop else None,
            "tensors": records(ALIGNMENT, found.rows),
        }
    )


@dataclass(frozen=True)
class AnswerRow:
    """A class of a picture and its probability in percent; the name of the `picture` stands beside its first."""

    picture: str | None
    percent: float
    index: int
    name: str


PREDICTIONS: tuple[Column[AnswerRow], ...] = (
    Column("picture", "picture", field("picture"), fold=True, blank=""),
    figure("percent", "%", field("percent"), "{:.2f}"),
    figure("index", "index", field("index")),
    Column("class", "class", field("name"), fold=True),
)


def predictions_table(answers: Mapping[str, Iterable[tuple[float, int, str]]], by: str) -> ReportTable[AnswerRow]:
    """The classes of each picture as (probability, index, name), best first; `by` names the model."""
    rows = [
        AnswerRow(None if rank else picture, 100 * probability, index, name)
        for picture, best in answers.items()
        for rank, (probability, index, name) in enumerate(best)
    ]
    return ReportTable(PREDICTIONS, rows, [by], style=lambda row: "" if row.picture else "dim")
