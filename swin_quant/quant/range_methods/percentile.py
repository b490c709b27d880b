"""A share of the values is kept, whatever the rest are."""

import math
from fractions import Fraction

import numpy as np

from swin_quant.quant.range_methods.method import RangeMethod
from swin_quant.quant.statistics import Statistics


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The upper edge of the first bin up to which at least `percentile` percent of the values lie."""
    cumulative = np.cumsum(statistics.counts)
    # Exact, since 99.9 / 100 * 1000 is more than 999 in floating point, and one count can be many bins away.
    wanted = math.ceil(Fraction(str(percentile)) * int(cumulative[-1]) / 100)
    return statistics.edge(int(np.searchsorted(cumulative, wanted, side="left")) + 1)


METHOD = RangeMethod(search)
