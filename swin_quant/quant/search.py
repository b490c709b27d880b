"""Search the layers to leave float: the fastest policy within a budget of loss.

Greedy, and measured at every step: layers are ordered by their error for each millisecond that quantizing them saves.
Bisection finds the shortest start of that list that meets the budget if left float (more float layers never lose much);
then each of its layers is tried again in int8.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swin_quant.base.errors import UsageError
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Policy

Within = Callable[[frozenset[str]], bool]
_LEAST = 1e-6  # of all layers' milliseconds: counts as the saving of a layer that saves nothing


@dataclass(frozen=True)
class Unit:
    """The nodes of a layer, which are switched together.

    `error`: the power of the logits' noise if only these nodes quantize, relative to the logits. `saved_ms`: the
    measured time that they save on the engine, maybe negative; zero if it could not be told.
    """

    name: str
    nodes: tuple[str, ...]
    error: float
    saved_ms: float

    @property
    def sqnr_db(self) -> float:
        """The logits' SQNR if only these nodes quantize; infinite if that changes nothing."""
        return -10 * math.log10(self.error) if self.error else math.inf


@dataclass(frozen=True)
class Budget:
    """Limits of the loss: expected drop of top-1 in points, agreement in percent, SQNR in dB; None: no limit.

    The drop counts with two standard errors: among many policies, one is good by chance on the given pictures.
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
    """A measured policy: the number of enabled `nodes`, its loss, and a batch's milliseconds on the engine, or None."""

    policy: str
    nodes: int
    loss: Loss
    ms: float | None
    is_found: bool = False
    on_front: bool = False

    @property
    def figures(self) -> str:
        """The measured figures in words."""
        return self.loss.figures + ("" if self.ms is None else f", {self.ms:.3f} ms")


@dataclass(frozen=True)
class SearchResult:
    """The policy, its file, all candidates, the fastest first, and whether the budget was met.

    `left_float`: layers that could be quantized and are left float; `cost_ms`: the time that this costs a batch, None
    if it was not measured.
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
        """The policy's own measurement."""
        return next(one for one in self.candidates if one.is_found)


def check_limit(name: str, value: float | None, most: float = math.inf) -> None:
    """UsageError for a limit of the option `name` that no policy meets, or that every policy meets."""
    if value is not None and not (0 <= value <= most and value < math.inf):
        limits = "a number from 0" + (f" to {most:g}" if most < math.inf else " up")
        raise UsageError(f"‹{name}› {value:g}: must be {limits}")


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Units that int8 makes slower first, then by error for each millisecond saved, the largest first."""
    least = _LEAST * max(1e-9, sum(abs(unit.saved_ms) for unit in units))
    return sorted(units, key=lambda unit: (unit.saved_ms < 0, unit.error / max(unit.saved_ms, least)), reverse=True)


def fastest(units: Sequence[Unit]) -> int:
    """The number of first units in order that take the least time if left float: those that int8 makes slower."""
    return sum(unit.saved_ms < 0 for unit in units)


def prefix(units: Sequence[Unit], length: int) -> frozenset[str]:
    """The names of the first `length` units in the order of `in_order`."""
    return frozenset(unit.name for unit in in_order(units)[:length])


def cheapest(
    units: Sequence[Unit], within: Within, again: Callable[[frozenset[str]], Within] | None = None
) -> frozenset[str] | None:
    """The names of the fewest units to leave float so that `within` holds; units that int8 makes slower stay float.

    None if it does not hold even for all units. `within` is called about log2(n) times, and once more for each unit of
    the first result; for these, `again(result)` replaces it if given.
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
    """How many of the first units can be left float within `most_ms`; None if even the fastest number takes longer."""
    least = fastest(units)  # up to there, time falls
    low, high = least - 1, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        if milliseconds(prefix(units, middle)) <= most_ms:
            low = middle
        else:
            high = middle - 1
    return None if low < least else low


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (loss, time) on the Pareto front, by time."""
    order = sorted(range(len(points)), key=lambda index: (points[index][1], points[index][0]))
    found: list[int] = []
    for index in order:
        if not found or points[index][0] < points[found[-1]][0]:
            found.append(index)
    return found
