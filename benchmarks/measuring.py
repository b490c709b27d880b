"""A bench: candidates timed in interleaved rounds and their logits compared; a row for each candidate and batch.

Each candidate has a process of its own, so that the peak memory is its own. They are timed in turn, a block of calls
each, round after round: heat or another program slows down all alike, and a ratio of two is taken within each round.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from pages import ROOT
from torch import Tensor

from swin_quant.base.cpu import BFLOAT16_FEATURES, INT8_FEATURES, features, usable_cores
from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.progress import log, track
from swin_quant.cards.card import versions
from swin_quant.quant.outputs import rows
from swin_quant.report import table
from swin_quant.report.table import Column, ReportTable, figure
from swin_quant.score.engine import Engine, time_calls
from swin_quant.score.run_engines import difference

sys.path.append(str(ROOT / "tools" / "cuda"))
from jobs import JobFailed, JobProcess  # noqa: E402


@dataclass(frozen=True)
class BenchCandidate:
    """One engine of a bench: `load`, a picklable function, makes it; `file` is its artifact.

    `baseline` names the candidate that its latency is compared with, e.g. float32 on the same engine.
    """

    name: str
    load: Callable[[], Engine]
    file: Path | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class BenchPlan:
    """The extent of a bench: `rounds`, each with at least `seconds` for each candidate, on `threads` threads."""

    batches: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    seconds: float = 1.0
    threads: int = field(default_factory=usable_cores)


@dataclass
class BenchRow:
    """One candidate at one batch. Latencies in ms of a batch, memory and file in MB, agreement in percent.

    `speedup` is over `baseline`, a candidate's name, at the same batch: the median of the ratios within rounds.
    `sqnr_db` and `agreement` compare with the first candidate; None for that one, for equal logits, and if unmeasured.
    `failure` says why there is no latency. `calls`: ms of each call, by round.
    """

    batch: int
    candidate: str
    baseline: str | None
    file_mb: float | None
    calls: list[list[float]] = field(default_factory=list)
    speedup: float | None = None
    peak_mb: float | None = None
    int8_gemms: int | None = None
    all_gemms: int | None = None
    sqnr_db: float | None = None
    agreement: float | None = None
    library: str | None = None
    failure: str | None = None

    @property
    def p50_ms(self) -> float | None:
        return median(sum(self.calls, [])) if self.calls else None

    @property
    def p90_ms(self) -> float | None:
        """The 90th percentile, interpolated between calls; a single call is its own percentile."""
        every = sum(self.calls, [])
        return quantiles(every, n=10, method="inclusive")[-1] if len(every) > 1 else self.p50_ms

    @property
    def images_per_s(self) -> float | None:
        """At the median latency."""
        return 1000 * self.batch / self.p50_ms if self.p50_ms else None


@dataclass(frozen=True)
class BenchReport:
    """Rows, the first candidate of each batch being the reference, and the circumstances of the measurement."""

    name: str
    rows: list[BenchRow]
    plan: BenchPlan
    pictures: int
    cautions: list[str]  # warnings of engines about this CPU
    versions: dict[str, Any] = field(default_factory=versions)
    int8_features: list[str] = field(default_factory=lambda: features(INT8_FEATURES))
    bfloat16_features: list[str] = field(default_factory=lambda: features(BFLOAT16_FEATURES))


def noise(count: int, shape: Sequence[int]) -> Tensor:
    """Seeded noise, good enough to measure latency and differences of logits."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


@dataclass
class _Answers:
    """The engine in the process of a candidate, loaded at the first question."""

    load: Callable[[], Engine]
    threads: int
    engine: Engine | None = None

    def __call__(self, question: tuple[Any, ...]) -> Any:
        what, *arguments = question
        if self.engine is None:
            torch.set_num_threads(self.threads)
            log.addHandler(logging.NullHandler())  # the warnings of engines are among their details
            self.engine = self.load()
        if what == "time":
            return time_calls(self.engine, *arguments)
        if what == "peak":  # MB; it starts anew with each program
            status = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
        if what == "details":
            return dict(self.engine.details)
        with torch.inference_mode():
            return rows(self.engine(torch.from_numpy(arguments[0]).to(self.engine.device))).float().cpu().numpy()


def measure(name: str, candidates: Sequence[BenchCandidate], plan: BenchPlan, images: Tensor) -> BenchReport:
    """Time candidates on seeded inputs, and compare their logits for `images` with those of the first.

    The largest batch comes first: an impossible one is refused before anything is measured. A candidate whose process
    dies has a `failure` in place of that batch's times. An error of a candidate's engine is raised here.
    """
    found, cautions = dict[int, list[BenchRow]](), dict[str, None]()
    logits, details = dict[str, Tensor](), dict[str, dict[str, Any]]()
    chunk = min(len(images), max(plan.batches))

    def examine(candidate: str, process: JobProcess) -> None:
        parts = [torch.from_numpy(process.do(("logits", part.numpy()))) for part in images.split(chunk)]
        logits[candidate], details[candidate] = torch.cat(parts), process.do(("details",))
        if caution := details[candidate].get("caution"):
            cautions[caution] = None

    for batch in sorted(set(plan.batches), reverse=True):
        found[batch] = _time(candidates, batch, plan, images.shape[1:], None if found else examine)
    report = [row for batch in dict.fromkeys(plan.batches) for row in found[batch]]
    reference = candidates[0].name
    for row in report:
        known = details.get(row.candidate, {})
        row.int8_gemms, row.all_gemms, row.library = (known.get(key) for key in ("int8_gemms", "all_gemms", "library"))
        if row.candidate in logits and row.candidate != reference:
            far = difference(logits[row.candidate], logits[reference])
            row.sqnr_db, row.agreement = far["sqnr_db"], far["agreement"]
        base = next((one for one in found[row.batch] if one.candidate == row.baseline), None)
        if base and base.calls and row.calls:
            pairs = zip(base.calls, row.calls, strict=False)
            row.speedup = median(median(theirs) / median(ours) for theirs, ours in pairs)
    return BenchReport(name, report, plan, len(images), list(cautions))


def _time(
    candidates: Sequence[BenchCandidate],
    batch: int,
    plan: BenchPlan,
    shape: Sequence[int],
    afterwards: Callable[[str, JobProcess], None] | None,
) -> list[BenchRow]:
    timings: dict[str, BenchRow] = {}
    processes: dict[str, JobProcess] = {}

    def attempt(name: str, work: Callable[[], Any]) -> None:
        """Do a part of a candidate's work; one whose process dies has no times."""
        try:
            work()
        except JobFailed as error:
            timings[name].failure, timings[name].calls = f"{name}: {error}", []
            processes.pop(name, None)
            log.warning("%s: %s", name, error)
        except SwinQuantError as error:
            raise type(error)(f"{name}: {error}") from error

    def time_block(name: str) -> None:
        timings[name].calls.append(processes[name].do(("time", batch, tuple(shape), plan.seconds)))
        timings[name].peak_mb = processes[name].do(("peak",))

    with ExitStack() as stack:
        for one in track(candidates, f"loading, batch {batch}", len(candidates), "candidates"):
            size = one.file.stat().st_size / 1e6 if one.file and one.file.is_file() else None
            timings[one.name] = BenchRow(batch, one.name, one.baseline, size)
            processes[one.name] = process = JobProcess(_Answers(one.load, plan.threads))
            stack.callback(process.close)
            # One call compiles, and allocates the memory of this batch
            attempt(one.name, lambda process=process: process.do(("time", batch, tuple(shape), 0.0)))
        for number in track(range(plan.rounds), f"measuring, batch {batch}", plan.rounds, "rounds"):
            names = list(processes)
            cut = number % max(len(names), 1)  # no candidate always runs after the same one and its heat
            for name in (*names[cut:], *names[:cut]):
                attempt(name, lambda name=name: time_block(name))
        if afterwards:
            for name in track(list(processes), "comparing logits", len(processes), "candidates"):
                try:
                    afterwards(name, processes[name])
                except JobFailed as error:
                    log.warning("%s: %s", name, error)
    return list(timings.values())


BENCH: tuple[Column[BenchRow], ...] = (
    figure("batch", "batch", table.field("batch")),
    Column("candidate", "engine, precision, policy", table.field("candidate"), fold=True),
    figure("p50_ms", "p50 ms", table.field("p50_ms"), "{:.2f}"),
    figure("p90_ms", "p90 ms", table.field("p90_ms"), "{:.2f}"),
    figure("images_per_s", "images/s", table.field("images_per_s"), "{:.1f}", spare=True),
    figure("speedup", "x base", table.field("speedup"), "{:.2f}"),
    figure("peak_mb", "peak MB", table.field("peak_mb"), "{:.0f}", spare=True),
    figure("file_mb", "file MB", table.field("file_mb"), "{:.1f}", spare=True),
    figure("int8_gemms", "int8 GEMMs", lambda row: row.int8_gemms and f"{row.int8_gemms}/{row.all_gemms}"),
    figure("sqnr_db", "SQNR dB", table.field("sqnr_db"), "{:.1f}"),
    figure("agreement", "agree %", table.field("agreement"), "{:.1f}"),
)


def bench_table(report: BenchReport) -> ReportTable[BenchRow]:
    """The rows, with the meaning of the figures and the conditions they were measured under."""
    plan = report.plan
    bases = dict.fromkeys(row.baseline for row in report.rows if row.baseline)
    libraries = dict.fromkeys(name for row in report.rows if row.library for name in row.library.split(", "))
    texts = [
        f"{report.name} on {report.versions.get('cpu')}; threads: {plan.threads}; {plan.rounds} interleaved rounds of "
        f"{plan.seconds:g} s each, a process for each row; torch {report.versions.get('torch')}"
        + "".join(f", {name}" for name in libraries),
        f"the CPU's int8 instructions: {', '.join(report.int8_features) or 'none known'}; "
        f"bfloat16: {', '.join(report.bfloat16_features) or 'none known'}",
        *([f"x base: over {', '.join(bases)}, of its own engine; median of the ratios within rounds"] if bases else []),
        f"SQNR and agreement: with {report.rows[0].candidate}, on {report.pictures} seeded noise pictures",
        "int8 GEMMs: of the engine's own products; those inside compiled operators are not counted",
        "peak MB: of the whole process, Python and torch included",
        *report.cautions,
        *(row.failure for row in report.rows if row.failure),
    ]
    return ReportTable(BENCH, report.rows, [one_line(note) for note in texts])
