"""A candidate of a bench, the process that it has for itself, so that the peak memory is its own, and its latency.

Candidates are timed in turn, a block of calls each, round after round. Heat or another program then slows down all
alike, and a ratio of two is taken within each round.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from pages import ROOT
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log, track
from swin_quant.quant.outputs import rows
from swin_quant.score.candidate import time_calls
from swin_quant.score.engine import Engine

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
class Identity:
    """The names of a loaded engine, and the memory of its process before loading, in MB."""

    engine: str
    precision: str
    policy: str | None
    before_mb: float


class Crash(SwinQuantError):
    """The process of a candidate has died: out of memory, or a fault in a library."""


class Runner:
    """The process of one candidate, as a context manager. Its errors are raised here, with the candidate's name."""

    def __init__(self, candidate: BenchCandidate, threads: int) -> None:
        self.name = candidate.name
        self._process = JobProcess(_Answers(candidate.load, threads))

    def __enter__(self) -> "Runner":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def identity(self) -> Identity:
        """Wait until the engine is loaded."""
        return self._ask("identity")

    def time(self, batch: int, shape: Sequence[int], seconds: float) -> list[float]:
        """Milliseconds of each call on `batch` seeded inputs, for `seconds` at least, after one untimed call."""
        return self._ask("time", batch, tuple(shape), seconds)

    def peak_mb(self) -> float:
        """The largest memory (resident set) of the process so far."""
        return self._ask("peak")

    def logits(self, images: Tensor) -> Tensor:
        """float32 [B, classes] of `images` [B, *shape]; other outputs in one row each."""
        return torch.from_numpy(self._ask("logits", images.numpy()))

    def details(self) -> dict[str, Any]:
        """The engine's details; may load the model again."""
        return self._ask("details")

    def _ask(self, *question: Any) -> Any:
        try:
            return self._process.do(question)
        except SwinQuantError as error:
            kind = Crash if isinstance(error, JobFailed) else type(error)
            raise kind(f"{self.name}: {error}") from error


class _Answers:
    """The engine in the process of a candidate, loaded at the first question."""

    def __init__(self, load: Callable[[], Engine], threads: int) -> None:
        self.load, self.threads = load, threads
        self.engine: Engine | None = None

    def __call__(self, question: tuple[Any, ...]) -> Any:
        what, *arguments = question
        if self.engine is None:
            torch.set_num_threads(self.threads)
            log.addHandler(logging.NullHandler())  # the warnings of engines are among their details
            before = memory_mb("VmRSS")
            self.engine = self.load()
            self.identity = Identity(self.engine.name, self.engine.precision, self.engine.policy, before)
        match what:
            case "identity":
                return self.identity
            case "time":
                return time_calls(self.engine, *arguments)
            case "peak":
                return memory_mb("VmHWM")
            case "details":
                return dict(self.engine.details)
        with torch.inference_mode():
            images = torch.from_numpy(arguments[0]).to(self.engine.device)
            return rows(self.engine(images)).float().cpu().numpy()


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (most so far) of this process, in MB. VmHWM starts anew with each program."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


@dataclass(frozen=True)
class Timing:
    """Latencies of one candidate at one batch, in milliseconds, by round; `failure` says why there are none."""

    candidate: str
    batch: int
    identity: Identity | None = None
    rounds: list[list[float]] = field(default_factory=list)
    peak_mb: float | None = None
    failure: str | None = None

    @property
    def calls(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def p50_ms(self) -> float | None:
        return median(self._all) if self.rounds else None

    @property
    def p90_ms(self) -> float | None:
        """The 90th percentile, interpolated between calls; a single call is its own percentile."""
        if not self.rounds:
            return None
        return quantiles(self._all, n=10, method="inclusive")[-1] if self.calls > 1 else self._all[0]

    @property
    def images_per_s(self) -> float | None:
        """At the median latency."""
        return 1000 * self.batch / self.p50_ms if self.p50_ms else None

    def speedup(self, base: "Timing") -> float | None:
        """How many times faster than `base`: the median of the ratios within each round."""
        pairs = zip(base.rounds, self.rounds, strict=False)
        return median(median(theirs) / median(ours) for theirs, ours in pairs) if base.rounds and self.rounds else None

    @property
    def _all(self) -> list[float]:
        return [call for block in self.rounds for call in block]


def interleave(
    candidates: Sequence[BenchCandidate],
    batches: Sequence[int],
    rounds: int,
    seconds: float,
    shape: Sequence[int],
    threads: int = 1,
    afterwards: Callable[[Runner], None] | None = None,
) -> list[Timing]:
    """Time `candidates` on seeded inputs of a `shape`, channels first, in each round for at least `seconds` each.

    The largest batch comes first: an impossible one is refused before anything is measured. The result is in the order
    of `batches`, then of `candidates`. A candidate whose process dies has a `failure` in place of that batch's times.
    `afterwards` is called once for each candidate, after the largest batch. A SwinQuantError or UsageError of a
    candidate's engine is raised here.
    """
    if not candidates or not batches or rounds < 1:
        raise UsageError("nothing to measure: give a candidate, a batch and a round at least")
    found: dict[int, list[Timing]] = {}
    for batch in sorted(set(batches), reverse=True):
        after = None if found else afterwards
        found[batch] = list(_one_batch(candidates, batch, rounds, seconds, shape, threads, after))
    return [timing for batch in dict.fromkeys(batches) for timing in found[batch]]


def _one_batch(
    candidates: Sequence[BenchCandidate],
    batch: int,
    rounds: int,
    seconds: float,
    shape: Sequence[int],
    threads: int,
    afterwards: Callable[[Runner], None] | None,
) -> Iterator[Timing]:
    timings = {candidate.name: Timing(candidate.name, batch) for candidate in candidates}
    runners: dict[str, Runner] = {}

    def fail(name: str, error: Crash) -> None:
        timings[name] = Timing(name, batch, timings[name].identity, failure=str(error))
        runners.pop(name, None)
        log.warning("%s", error)

    with ExitStack() as stack:
        for candidate in track(candidates, f"loading, batch {batch}", len(candidates), "candidates"):
            name = candidate.name
            try:
                runner = stack.enter_context(Runner(candidate, threads))
                timings[name] = replace(timings[name], identity=runner.identity())
                runner.time(batch, shape, 0.0)  # compiles, and allocates the memory of this batch
                runners[name] = runner
            except Crash as error:
                fail(name, error)
        for number in track(range(rounds), f"measuring, batch {batch}", rounds, "rounds"):
            for name in rotated(list(runners), number):
                try:
                    timings[name].rounds.append(runners[name].time(batch, shape, seconds))
                    timings[name] = replace(timings[name], peak_mb=runners[name].peak_mb())
                except Crash as error:
                    fail(name, error)
        if afterwards:
            for runner in track(list(runners.values()), "comparing logits", len(runners), "candidates"):
                try:
                    afterwards(runner)
                except Crash as error:
                    log.warning("%s", error)
    yield from timings.values()


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names with another one first in each round: no candidate always runs after the same one and its heat."""
    cut = number % len(names) if names else 0
    return [*names[cut:], *names[:cut]]
