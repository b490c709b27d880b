"""Percentile: a share of the values is kept, whatever the rest."""

import math
from fractions import Fraction

import numpy as np

from swin_quant.quant.range_methods import RangeMethod
from swin_quant.quant.statistics import Statistics


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The upper edge of the first bin up to which at least `percentile` percent of the values lie."""
    cumulative = np.cumsum(statistics.counts)
    # Exact arithmetic: 99.9 / 100 * 1000 exceeds 999 in floating point, and one count can be many bins away.
    wanted = math.ceil(Fraction(str(percentile)) * int(cumulative[-1]) / 100)
    return statistics.edge(int(np.searchsorted(cumulative, wanted, side="left")) + 1)


def between(statistics: Statistics, steps: int, percentile: float) -> tuple[float, float]:
    """Each end clips at most half of the share that is not kept."""
    sides = statistics.both_sides()
    counted = [int(side.counts.sum()) for side in sides]
    wanted = math.ceil((100 + Fraction(str(percentile))) * sum(counted) / 200)
    low, high = (_end(side, wanted - sum(counted) + own) for side, own in zip(sides, counted, strict=True))
    return -low, high


def _end(side: Statistics, wanted: int) -> float:
    """The upper edge of the first bin up to which `wanted` values lie; 0 for none."""
    found = np.searchsorted(np.cumsum(side.counts), wanted, side="left")
    return side.edge(int(found) + 1) if wanted > 0 else 0.0


METHOD = RangeMethod(search, between)
