"""Statistics of a node's values, and the error of rounding and clipping them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swin_quant.quant.fake_quant import E4M3, is_symmetric


@dataclass(frozen=True)
class Statistics:
    """A node's values: int64 counts [bins] of |x| in equal bins of `width` from 0, and the exact largest |x|.

    `sides`: the same for values below zero, and for all others; None if signs were not kept.
    """

    counts: NDArray[np.int64]
    width: float
    largest: float
    sides: "tuple[Statistics, Statistics] | None" = None

    def edge(self, index: int) -> float:
        """Upper edge of the first `index` bins, at most the largest value seen."""
        return min(index * self.width, self.largest)

    def both_sides(self) -> "tuple[Statistics, Statistics]":
        """Statistics of the values below zero, and of all others. ValueError if signs were not kept."""
        if self.sides is None:
            raise ValueError("these statistics are of magnitudes only")
        return self.sides

    def occupied(self) -> NDArray[np.int64]:
        """The counts up to and including the last bin that is not empty."""
        return np.trim_zeros(self.counts, "b")


def join_sides(below: Statistics, above: Statistics) -> Statistics:
    """Statistics of all values; both sides have as many bins, with powers of two as widths."""
    width, bins = max(below.width, above.width), len(below.counts)
    counts = np.zeros(bins, np.int64)
    for side in (below, above):
        merged = min(round(width / side.width), bins)  # bins in the place of one
        counts[: bins // merged] += side.counts.reshape(-1, merged).sum(1)
    return Statistics(counts, width, max(below.largest, above.largest), (below, above))


def sqnr_db(statistics: Statistics, amax: float, qmin: int, qmax: int) -> float:
    """Signal to quantization noise of a node's values after rounding and clipping to `amax`, in dB.

    It uses only the histogram, with values spread evenly inside their bin. The grid is amax / qmax * {qmin..qmax}; a
    symmetric one counts as equally long on both sides of zero.
    """
    step = amax / qmax
    sides = [(statistics, amax)]
    if not is_symmetric(qmin, qmax):
        sides = list(zip(statistics.both_sides(), (-qmin * step, amax), strict=True))
    signal = noise = 0.0
    for side, end in sides:
        counts = side.occupied()
        edges, weights = np.arange(len(counts) + 1) * side.width, slope(counts) / side.width
        ends, steps = np.array([end]), np.array([step])
        errors = e4m3_error(edges, ends) if (qmin, qmax) == E4M3 else error_integral(edges, ends, steps)
        noise += float(errors[0] @ weights)
        signal += float(edges**3 / 3 @ weights)
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def clipped_share(statistics: Statistics, amax: float) -> float:
    """The share of values with a magnitude above `amax`; values are taken as spread evenly inside their bin."""
    position = amax / statistics.width
    inside = int(position)
    counts = statistics.counts
    if inside >= len(counts) or amax >= statistics.largest:
        return 0.0
    beyond = counts[inside:].sum() - counts[inside] * (position - inside)
    return float(beyond / max(counts.sum(), 1))


def slope(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights for a function's values at the edges of bins; their sum is that of counts times its differences."""
    # Summation by parts: sum of counts[j] * (F[j + 1] - F[j]) is the sum of F[j] * (counts[j - 1] - counts[j]).
    return -np.diff(counts.astype(np.float64), prepend=0.0, append=0.0)


def error_integral(
    edges: NDArray[np.floating[Any]], amax: NDArray[np.float64], step: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Integral from 0 to each edge of the squared quantization error: [candidates, edges]. amax is whole steps.

    In units of a step the error is the sawtooth u - round(u), whose square integrates to n / 12 + r**3 / 3 with n =
    round(u), r = u - n; beyond amax it is u - amax.
    """
    step = step[:, None]
    inside = np.minimum(edges, amax[:, None])
    beyond = edges - inside
    inside /= step
    level = np.rint(inside)
    inside -= level
    rounding = inside * inside * inside / 3 + level / 12
    return step**3 * rounding + beyond * beyond * beyond / 3


_E4M3_STEPS = 2.0 ** np.arange(-9, 6)  # steps in the octaves [0, 2^-5) to [256, 512), of which all but the first have 8
_E4M3_BEFORE = np.concatenate([[0.0], np.cumsum(np.array([16, *[8] * 13]) * _E4M3_STEPS[:-1] ** 3 / 12)])
_E4M3_OFFSETS = _E4M3_BEFORE - np.array([0, *[8] * 14]) * _E4M3_STEPS**3 / 12


def e4m3_error(edges: NDArray[np.floating[Any]], amax: NDArray[np.float64]) -> NDArray[np.float64]:
    """`error_integral` for E4M3 with scale amax / 448: steps are equal inside an octave."""
    scale = amax[:, None] / E4M3[1]
    inside = np.minimum(edges, amax[:, None])
    beyond = edges - inside
    inside = inside / scale
    octave = np.clip(np.frexp(inside)[1] + 5, 0, len(_E4M3_STEPS) - 1)
    step = _E4M3_STEPS[octave]
    level = np.rint(inside / step)
    rest = inside / step - level
    rounding = step**3 * (rest**3 / 3 + level / 12) + _E4M3_OFFSETS[octave]
    return scale**3 * rounding + beyond**3 / 3
