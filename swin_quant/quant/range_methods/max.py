"""Max: nothing is clipped."""

from swin_quant.quant.range_methods import RangeMethod
from swin_quant.quant.statistics import Statistics


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The largest magnitude."""
    return statistics.largest


def between(statistics: Statistics, steps: int, percentile: float) -> tuple[float, float]:
    """Both observed ends."""
    below, above = statistics.both_sides()
    return -below.largest, above.largest


METHOD = RangeMethod(search, between)
