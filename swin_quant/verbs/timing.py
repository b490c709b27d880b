"""Time engines in turns on seeded noise: another program or heat then slows down all alike."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.score.candidate import time_calls
from swin_quant.score.engine import Engine

ROUNDS, SECONDS = 5, 0.2  # for each engine


@dataclass(frozen=True)
class Latency:
    """The median latency of a batch on an engine, in milliseconds, and how many times as fast it is as the first.

    `beside`: the first, which it was timed beside; empty for the first itself.
    """

    subject: str
    batch: int
    ms: float
    speedup: float
    beside: str = ""

    @property
    def figures(self) -> str:
        rate = 1000 * self.batch / self.ms
        ratio = f", {self.speedup:.2f} times as fast as {self.beside}" if self.beside else ""
        return f"{self.ms:.2f} ms a batch of {self.batch}, {rate:.1f} images/s{ratio}"

    def to_dict(self) -> dict[str, Any]:
        """The figures as data."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.subject}: {self.figures}"


def timed_in_turns(engines: Sequence[Engine], batch: int, shape: Sequence[int]) -> list[tuple[float, ...]]:
    """The milliseconds of each engine for a batch of seeded noise, round after round: the median within each."""
    for engine in engines:
        time_calls(engine, batch, shape, 0.0)  # compiles, and allocates memory
    return [tuple(median(time_calls(one, batch, shape, SECONDS)) for one in engines) for _ in range(ROUNDS)]


def compare_latency(engines: Mapping[str, Engine], batch: int, shape: Sequence[int]) -> tuple[Latency, ...]:
    """The latency of each engine by its name; speedups are medians of the ratios within rounds."""
    if batch < 1:
        raise UsageError(f"‹batch› {batch}: must be at least 1")
    rounds, first = timed_in_turns(list(engines.values()), batch, shape), next(iter(engines), "")
    found = []
    for place, name in enumerate(engines):
        ms, speedup = median(row[place] for row in rounds), median(row[0] / row[place] for row in rounds)
        found.append(Latency(name, batch, ms, speedup, first if place else ""))
    return tuple(found)
