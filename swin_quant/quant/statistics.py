"""What a node saw while it was observed, and what rounding and clipping would leave of it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def sqnr_db(statistics: Statistics, amax: float, bits: int) -> float:
    """What rounding and clipping to `amax` leaves of a node's values: signal to quantization noise, in dB.

    From the histogram alone, on a grid as long below zero as above: values are taken as spread evenly inside their bin.
    """
    counts = statistics.occupied()
    edges, weights = np.arange(len(counts) + 1) * statistics.width, slope(counts)
    noise = float(error_integral(edges, np.array([amax]), 2 ** (bits - 1) - 1)[0] @ weights)
    signal = float(edges**3 / 3 @ weights)
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def slope(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights of the values of a function at the edges of bins: with its differences over bins, counts give its sum."""
    # Summation by parts: sum of counts[j] * (F[j + 1] - F[j]) is the sum of F[j] * (counts[j - 1] - counts[j]).
    return -np.diff(counts.astype(np.float64), prepend=0.0, append=0.0)


def error_integral(edges: NDArray[np.floating[Any]], amax: NDArray[np.float64], qmax: int) -> NDArray[np.float64]:
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
