"""Range search: from a histogram of |x| to the clipping range `amax` of a node.

Each method is a pure function of a node's `Statistics` and of the number of integer levels, registered by the name
that `--calibrator` takes. A new method is a new decorated function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swin_quant.quant.names import BY_BITS, DEFAULT_PERCENTILE

Search = Callable[["Statistics", int, float], float]
RANGE_METHODS: dict[str, Search] = {}


@dataclass(frozen=True)
class Statistics:
    """What a node saw: int64 counts [bins] of |x| in equal bins of `width` from 0, and the exact largest |x|."""

    counts: NDArray[np.int64]
    width: float
    largest: float

    def edge(self, index: int) -> float:
        """Upper edge of the first `index` bins, but never above the largest value seen."""
        return min(index * self.width, self.largest)

    def occupied(self) -> NDArray[np.int64]:
        """The counts up to and including the last bin that is not empty."""
        return np.trim_zeros(self.counts, "b")


def search_range(method: str, statistics: Statistics, bits: int = 8, percentile: float = DEFAULT_PERCENTILE) -> float:
    """The amax that `method` gives for a symmetric signed grid of `bits` bits (0 only if all values were 0)."""
    if statistics.largest == 0.0:
        return 0.0
    return RANGE_METHODS[method](statistics, 2 ** (bits - 1), percentile)


def method_for(bits: int) -> str:
    """The method of BY_BITS for a node of `bits` bits."""
    return BY_BITS[max(least for least in BY_BITS if bits >= least)]


def sqnr_db(statistics: Statistics, amax: float, bits: int) -> float:
    """What rounding and clipping to `amax` leaves of a node's values: signal to quantization noise, in dB.

    From the histogram alone, on a grid as long below zero as above: values are taken as spread evenly inside their bin.
    """
    counts = statistics.occupied()
    edges, slope = np.arange(len(counts) + 1) * statistics.width, _slope(counts)
    noise = float(_error_integral(edges, np.array([amax]), 2 ** (bits - 1) - 1)[0] @ slope)
    signal = float(edges**3 / 3 @ slope)
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def _register(name: str) -> Callable[[Search], Search]:
    def add(search: Search) -> Search:
        RANGE_METHODS[name] = search
        return search

    return add


@_register("max")
def _max(statistics: Statistics, levels: int, percentile: float) -> float:
    """The largest magnitude: nothing is ever clipped."""
    return statistics.largest


@_register("percentile")
def _percentile(statistics: Statistics, levels: int, percentile: float) -> float:
    """The upper edge of the first bin up to which at least `percentile` percent of the values lie."""
    cumulative = np.cumsum(statistics.counts)
    # Exact, since 99.9 / 100 * 1000 is more than 999 in floating point, and one count can be many bins away.
    wanted = math.ceil(Fraction(str(percentile)) * int(cumulative[-1]) / 100)
    return statistics.edge(int(np.searchsorted(cumulative, wanted, side="left")) + 1)


@_register("mse")
def _mse(statistics: Statistics, levels: int, percentile: float) -> float:
    """The amax of least mean squared error, rounding and clipping together.

    Values are taken as spread evenly inside their bin, and the error is integrated in closed form over each bin:
    with steps finer than a bin, the error at bin centres would be that of an accidental alignment. So merged bins
    are good enough for a first look over 12 octaves, which all bins then refine around its best.
    """
    counts, width = statistics.occupied(), statistics.width
    rough = np.add.reduceat(counts, np.arange(0, len(counts), 8))
    guess = _least_error(rough, 8 * width, statistics.largest * np.geomspace(2.0**-12, 1.0, 512), levels - 1)
    near = np.geomspace(guess / 1.05, min(guess * 1.05, statistics.largest), 97)
    return _least_error(counts, width, near, levels - 1)


def _least_error(counts: NDArray[np.int64], width: float, candidates: NDArray[np.float64], qmax: int) -> float:
    edges = np.arange(len(counts) + 1) * width
    return float(candidates[np.argmin(_error_integral(edges, candidates, qmax) @ _slope(counts))])


def _slope(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    # Summation by parts: sum of counts[j] * (F[j + 1] - F[j]) is the sum of F[j] * (counts[j - 1] - counts[j]).
    return -np.diff(counts.astype(np.float64), prepend=0.0, append=0.0)


def _error_integral(edges: NDArray[np.floating[Any]], amax: NDArray[np.float64], qmax: int) -> NDArray[np.float64]:
    """Integral from 0 to each edge of the squared quantization error: [candidates, edges].

    In units of a step the error is the sawtooth u - round(u), whose square integrates to n / 12 + r**3 / 3 with
    n = round(u), r = u - n; beyond amax it is u - amax.
    """
    step = amax[:, None] / qmax
    inside = np.minimum(edges, amax[:, None])
    beyond = edges - inside
    inside /= step
    level = np.rint(inside)
    inside -= level
    rounding = inside * inside * inside / 3 + level / 12
    return step**3 * rounding + beyond * beyond * beyond / 3


@_register("entropy")
def _entropy(statistics: Statistics, levels: int, percentile: float) -> float:
    """The amax whose quantized distribution loses least information (Migacz, 8-bit inference with TensorRT, 2017).

    For each candidate of i bins, P is the histogram clipped to i bins (the rest added to the last), Q the same
    bins averaged over `levels` segments, empty bins kept empty; the largest i of least KL(P || Q) wins. The zero
    bin is replaced by its neighbour, since zeros quantize without loss. KL needs of a segment only its sum and
    its number of occupied bins, so that prefix sums give all candidates at once.
    """
    counts = statistics.occupied().astype(np.float64)
    if len(counts) <= levels:
        return statistics.largest
    counts[0] = counts[1]
    total = counts.sum()
    if total == 0.0:
        return statistics.largest
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    self_information = np.concatenate([[0.0], np.cumsum(_xlogy(counts, counts))])

    sizes = np.arange(levels, len(counts) + 1)
    bounds = -(-sizes[:, None] * np.arange(levels + 1) // levels)  # segment k starts at ceil(i * k / levels)
    segment_sum = np.diff(sums[bounds], axis=1)
    mean_log = np.log(np.maximum(segment_sum, 1e-300)) - np.log(np.maximum(np.diff(filled[bounds], axis=1), 1))
    inside, last = sums[sizes], counts[sizes - 1]
    outside = total - inside

    p_log_p = self_information[sizes - 1] + _xlogy(last + outside, last + outside)
    p_log_q = (segment_sum * mean_log).sum(axis=1) + outside * mean_log[:, -1]
    with np.errstate(divide="ignore"):
        divergence = (p_log_p - p_log_q) / total - np.log(total) + np.log(inside)
    divergence[(last == 0) & (outside > 0)] = np.inf
    best = len(sizes) - 1 - int(np.argmin(divergence[::-1]))
    return statistics.edge(int(sizes[best]))


def _xlogy(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x > 0, x * np.log(np.maximum(y, 1e-300)), 0.0)
