"""Which layers stay float: the policy that costs the least time within a budget of loss.

Greedy, and measured at every step: layers are left float in the order of how much error they bring for each
millisecond that their quantization saves. The shortest such list within the budget is found by halving (more float
layers never lose much), then every layer of it is tried again in int8.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swin_quant.base.errors import UsageError
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Policy

Within = Callable[[frozenset[str]], bool]
_LEAST = 1e-6  # of the milliseconds of all: what a layer is taken to save that was measured to save nothing


@dataclass(frozen=True)
class Unit:
    """Nodes that are switched together, those of a layer.

    `error`: the power of the logits' noise when only they quantize, over that of the logits. `saved_ms`: how much
    faster the engine is with them on; it was measured, may be below zero, and is zero where nothing could be told.
    """

    name: str
    nodes: tuple[str, ...]
    error: float
    saved_ms: float

    @property
    def sqnr_db(self) -> float:
        """Of the logits when only they quantize; infinite where that changes nothing."""
        return -10 * math.log10(self.error) if self.error else math.inf


@dataclass(frozen=True)
class Budget:
    """The loss that may be: expected drop of top-1 in points, agreement in percent, SQNR in dB; None: any.

    The drop counts with two standard errors: among many policies, some one is good by chance on the pictures at hand.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    min_sqnr: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_limit(name, value, math.inf if name == "min_sqnr" else 100.0)

    def allows(self, loss: Loss) -> bool:
        return (
            (self.max_drop is None or loss.most_drop <= self.max_drop)
            and (self.min_agreement is None or loss.agreement >= self.min_agreement)
            and (self.min_sqnr is None or loss.sqnr_db >= self.min_sqnr)
        )

    def __str__(self) -> str:
        named = (
            ("expected drop of top-1 at most {:g} points", self.max_drop),
            ("agreement at least {:g} %", self.min_agreement),
            ("SQNR at least {:g} dB", self.min_sqnr),
        )
        return ", ".join(text.format(value) for text, value in named if value is not None)


@dataclass(frozen=True)
class TriedPolicy:
    """A policy that was measured: its loss, and milliseconds of a batch on the engine, None where those are not to be
    had; `nodes` that are on."""

    policy: str
    nodes: int
    loss: Loss
    ms: float | None
    is_found: bool = False
    on_front: bool = False

    @property
    def figures(self) -> str:
        """What was measured, in words."""
        return self.loss.figures + ("" if self.ms is None else f", {self.ms:.3f} ms")


@dataclass(frozen=True)
class SearchResult:
    """The policy, its file, all candidates, the fastest first, and whether the budget was met.

    `left_float`: the layers that it leaves float of those that could be quantized; `cost_ms`: how much slower than
    with all of these quantized a batch is, as measured; None where no time was.
    """

    policy: Policy
    file: Path
    candidates: tuple[TriedPolicy, ...]
    pictures: int
    met: bool
    left_float: tuple[Unit, ...]
    cost_ms: float | None

    @property
    def is_float(self) -> bool:
        """Whether it quantizes nothing."""
        return not self.found.nodes

    @property
    def found(self) -> TriedPolicy:
        """What was measured of the policy."""
        return next(one for one in self.candidates if one.is_found)


def check_limit(name: str, value: float | None, most: float = math.inf) -> None:
    """UsageError for a limit, called `name` where it was given, that no policy keeps, or that every one does."""
    if value is not None and not (0 <= value <= most and value < math.inf):
        limits = "a number from 0" + (f" to {most:g}" if most < math.inf else " up")
        raise UsageError(f"‹{name}› {value:g}: must be {limits}")


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Those first that int8 makes slower, then those that bring most error for the time that they save."""
    least = _LEAST * max(1e-9, sum(abs(unit.saved_ms) for unit in units))
    return sorted(units, key=lambda unit: (unit.saved_ms < 0, unit.error / max(unit.saved_ms, least)), reverse=True)


def fastest(units: Sequence[Unit]) -> int:
    """How many units of the order are left float where that takes the least time: those that int8 makes slower."""
    return sum(unit.saved_ms < 0 for unit in units)


def prefix(units: Sequence[Unit], length: int) -> frozenset[str]:
    """The names of the first so many in the order of `in_order`."""
    return frozenset(unit.name for unit in in_order(units)[:length])


def cheapest(
    units: Sequence[Unit], within: Within, again: Callable[[frozenset[str]], Within] | None = None
) -> frozenset[str] | None:
    """The names of the units to leave float, so that `within` holds and no one of them could be quantized as well;
    those that int8 makes slower stay float.

    None where it does not even hold for all of them. `within` is asked about log2(n) times, and once for each that
    the first search leaves float: that may be by another condition, `again` of what that search found.
    """
    low, high = 0, len(units)
    if not within(prefix(units, high)):
        return None
    while low < high:
        middle = (low + high) // 2
        if within(prefix(units, middle)):
            high = middle
        else:
            low = middle + 1
    found = prefix(units, high)
    within = again(found) if again else within
    for unit in sorted(units, key=lambda unit: (-unit.saved_ms, unit.error)):
        if unit.name in found and unit.saved_ms >= 0 and within(found - {unit.name}):
            found -= {unit.name}
    return found


def within_time(units: Sequence[Unit], most_ms: float, milliseconds: Callable[[frozenset[str]], float]) -> int | None:
    """How many units of the order can be left float before `milliseconds` is above `most_ms`; None where it is above
    it even for the fastest."""
    least = fastest(units)  # up to there time falls
    low, high = least - 1, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        if milliseconds(prefix(units, middle)) <= most_ms:
            low = middle
        else:
            high = middle - 1
    return None if low < least else low


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (loss, time) than which none is better in one and as good in the other; by time."""
    order = sorted(range(len(points)), key=lambda index: (points[index][1], points[index][0]))
    found: list[int] = []
    for index in order:
        if not found or points[index][0] < points[found[-1]][0]:
            found.append(index)
    return found
