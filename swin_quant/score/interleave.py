"""Interleaved timing: every candidate in its own process, a block of calls each in turn, round after round.

Heat or another program then slows down all candidates alike, and a ratio of two is taken within each round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log, track
from swin_quant.score.candidate import BenchCandidate, Crash, Identity, Runner


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
        for candidate in track(candidates, f"loading, batch {batch}", len(candidates)):
            name = candidate.name
            try:
                runner = stack.enter_context(Runner(candidate, threads))
                timings[name] = replace(timings[name], identity=runner.identity())
                runner.time(batch, shape, 0.0)  # compiles, and allocates the memory of this batch
                runners[name] = runner
            except Crash as error:
                fail(name, error)
        for number in track(range(rounds), f"measuring, batch {batch}", rounds):
            for name in rotated(list(runners), number):
                try:
                    timings[name].rounds.append(runners[name].time(batch, shape, seconds))
                    timings[name] = replace(timings[name], peak_mb=runners[name].peak_mb())
                except Crash as error:
                    fail(name, error)
        if afterwards:
            for runner in track(list(runners.values()), "comparing logits", len(runners)):
                try:
                    afterwards(runner)
                except Crash as error:
                    log.warning("%s", error)
    yield from timings.values()


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names with another one first in each round: no candidate always runs after the same one and its heat."""
    cut = number % len(names) if names else 0
    return [*names[cut:], *names[:cut]]
