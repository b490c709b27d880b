"""A bench: candidates timed in interleaved rounds and their logits compared; a row for each candidate and batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from measuring.processes import BenchCandidate, Runner, Timing, interleave
from swin_quant.base.cpu import BFLOAT16_FEATURES, INT8_FEATURES, features, usable_cores
from swin_quant.base.errors import UsageError, one_line
from swin_quant.cards.card import versions
from swin_quant.report.table import Column, ReportTable, figure
from swin_quant.report.table import field as value_of
from swin_quant.score.difference import difference
from swin_quant.score.options import EngineOptions


@dataclass(frozen=True)
class BenchRow:
    """One candidate at one batch. Latencies in ms of a batch, memory and file in MB, agreement and acc1 in percent.

    `speedup` is over `baseline`, a candidate's name, at the same batch: the median of the ratios within rounds.
    `sqnr_db` and `agreement` compare with the first candidate; None for that one, for equal logits, and if unmeasured.
    `failure` says why there is no latency.
    """

    candidate: str
    engine: str | None
    precision: str | None
    policy: str | None
    batch: int
    p50_ms: float | None
    p90_ms: float | None
    images_per_s: float | None
    calls: int
    baseline: str | None
    speedup: float | None
    peak_mb: float | None
    before_mb: float | None
    file_mb: float | None
    int8_gemms: int | None
    all_gemms: int | None
    sqnr_db: float | None
    agreement: float | None
    acc1: float | None
    library: str | None
    failure: str | None


@dataclass(frozen=True)
class BenchPlan:
    """The extent of a bench: `rounds`, each with at least `seconds` for each candidate, on `threads` threads."""

    batches: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    seconds: float = 1.0
    threads: int = field(default_factory=usable_cores)

    def __post_init__(self) -> None:
        for flag, value in (("‹rounds›", self.rounds), *(("‹batch›", batch) for batch in self.batches)):
            if value < 1:
                raise UsageError(f"{flag} {value}: must be at least 1")
        EngineOptions(threads=self.threads)
        if not 0 < self.seconds < 3600:
            raise UsageError(f"‹seconds› {self.seconds:g}: must be above 0 and below 3600")


@dataclass(frozen=True)
class BenchPictures:
    """Pictures to compare logits on: float32 [N, *shape], labels int64 [N] or None; `note` names them."""

    images: Tensor
    labels: Tensor | None
    note: str


@dataclass(frozen=True)
class BenchReport:
    """Rows, the first candidate of each batch being the reference, and the circumstances of the measurement.

    `gemms`: the type of each matrix product, by candidate. `cautions`: warnings of engines about this CPU.
    """

    name: str
    rows: list[BenchRow]
    reference: str
    plan: BenchPlan
    pictures: str
    versions: dict[str, Any] = field(default_factory=versions)
    int8_features: list[str] = field(default_factory=lambda: features(INT8_FEATURES))
    bfloat16_features: list[str] = field(default_factory=lambda: features(BFLOAT16_FEATURES))
    gemms: dict[str, dict[str, str]] = field(default_factory=dict)
    cautions: list[str] = field(default_factory=list)


def noise(count: int, shape: Sequence[int]) -> BenchPictures:
    """Seeded noise, good enough to measure latency and differences of logits when there are no pictures."""
    images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    return BenchPictures(images, None, f"{count} seeded noise pictures, not real ones")


def measure(
    name: str, candidates: Sequence[BenchCandidate], plan: BenchPlan, pictures: BenchPictures, has_classes: bool = True
) -> BenchReport:
    """Time `candidates` and compare their outputs with those of the first; `has_classes`: they are logits."""
    examined: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    chunk = min(len(pictures.images), max(plan.batches))

    def examine(runner: Runner) -> None:
        logits = torch.cat([runner.logits(images) for images in pictures.images.split(chunk)])
        examined[runner.name] = logits, runner.details()

    shape = pictures.images.shape[1:]
    timings = interleave(candidates, plan.batches, plan.rounds, plan.seconds, shape, plan.threads, examine)
    reference = candidates[0].name
    compared = {
        one: _compare(logits, examined, reference, pictures, has_classes) for one, (logits, _) in examined.items()
    }
    by_name = {candidate.name: candidate for candidate in candidates}
    details_of = {one: details for one, (_, details) in examined.items()}
    rows = [
        _row(by_name[one.candidate], one, timings, details_of.get(one.candidate, {}), compared.get(one.candidate, {}))
        for one in timings
    ]
    gemms = {one: details["gemms"] for one, details in details_of.items() if "gemms" in details}
    cautions = list(dict.fromkeys(caution for details in details_of.values() if (caution := details.get("caution"))))
    return BenchReport(name, rows, reference, plan, pictures.note, gemms=gemms, cautions=cautions)


def _compare(
    logits: Tensor, examined: Any, reference: str, pictures: BenchPictures, has_classes: bool
) -> dict[str, float | None]:
    """`acc1` if there are labels; `sqnr_db` and `agreement` with the reference's logits; other outputs have the SQNR
    alone."""
    found: dict[str, float | None] = {}
    if has_classes and pictures.labels is not None and (known := pictures.labels >= 0).any():
        found["acc1"] = 100 * (logits.argmax(1) == pictures.labels)[known].double().mean().item()
    if reference in examined and logits is not examined[reference][0]:
        other = difference(logits, examined[reference][0])
        found |= {"sqnr_db": other["sqnr_db"], "agreement": other["agreement"] if has_classes else None}
    return found


def _row(
    candidate: BenchCandidate, timing: Timing, timings: Sequence[Timing], details: Any, compared: dict[str, Any]
) -> BenchRow:
    same = (other for other in timings if other.batch == timing.batch and other.candidate == candidate.baseline)
    base = next(same, None)
    return BenchRow(
        candidate=candidate.name,
        batch=timing.batch,
        **{key: getattr(timing.identity, key, None) for key in ("engine", "precision", "policy", "before_mb")},
        p50_ms=timing.p50_ms,
        p90_ms=timing.p90_ms,
        images_per_s=timing.images_per_s,
        calls=timing.calls,
        baseline=candidate.baseline,
        speedup=timing.speedup(base) if base else None,
        peak_mb=timing.peak_mb,
        file_mb=candidate.file.stat().st_size / 1e6 if candidate.file and candidate.file.is_file() else None,
        **{key: details.get(key) for key in ("int8_gemms", "all_gemms", "library")},
        **{key: compared.get(key) for key in ("sqnr_db", "agreement", "acc1")},
        failure=timing.failure,
    )


BENCH: tuple[Column[BenchRow], ...] = (
    figure("batch", "batch", value_of("batch")),
    Column("candidate", "engine, precision, policy", value_of("candidate"), fold=True),
    Column("engine", "", value_of("engine")),
    Column("precision", "", value_of("precision")),
    Column("policy", "", value_of("policy")),
    figure("p50_ms", "p50 ms", value_of("p50_ms"), "{:.2f}"),
    figure("p90_ms", "p90 ms", value_of("p90_ms"), "{:.2f}"),
    figure("images_per_s", "images/s", value_of("images_per_s"), "{:.1f}", spare=True),
    Column("calls", "", value_of("calls")),
    Column("baseline", "", value_of("baseline")),
    figure("speedup", "x base", value_of("speedup"), "{:.2f}"),
    figure("peak_mb", "peak MB", value_of("peak_mb"), "{:.0f}", spare=True),
    Column("before_mb", "", value_of("before_mb")),
    figure("file_mb", "file MB", value_of("file_mb"), "{:.1f}", spare=True),
    Column(
        "int8_gemms",
        "int8 GEMMs",
        value_of("int8_gemms"),
        show=lambda row: f"{row.int8_gemms}/{row.all_gemms}",
        right=True,
    ),
    Column("all_gemms", "", value_of("all_gemms")),
    figure("sqnr_db", "SQNR dB", value_of("sqnr_db"), "{:.1f}"),
    figure("agreement", "agree %", value_of("agreement"), "{:.1f}"),
    figure("acc1", "acc@1", value_of("acc1"), "{:.2f}", may_lack=True),
    Column("library", "", value_of("library")),
    Column("failure", "", value_of("failure")),
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
