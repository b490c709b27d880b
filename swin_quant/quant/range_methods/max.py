"""Nothing is ever clipped."""

from swin_quant.quant.range_methods.method import RangeMethod
from swin_quant.quant.statistics import Statistics


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The largest magnitude."""
    return statistics.largest


METHOD = RangeMethod(search)
