"""Entropy: the quantized distribution loses least information."""

import numpy as np
from numpy.typing import NDArray

from swin_quant.quant.range_methods import RangeMethod
from swin_quant.quant.statistics import Statistics


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The amax whose quantized distribution loses least information (Migacz, 8-bit inference with TensorRT, 2017).

    For each candidate of i bins, P is the histogram clipped to i bins (the rest added to the last), Q the same bins
    averaged over `levels` segments, with empty bins kept empty; the largest i of least KL(P || Q) wins. The zero bin is
    replaced by its neighbour, since zeros quantize without loss. KL needs only each segment's sum and its number of
    occupied bins, so that prefix sums give all candidates at once.
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


def between(statistics: Statistics, steps: int, percentile: float) -> tuple[float, float]:
    """The observed ends, clipped to the symmetric range: the divergence is defined for magnitudes."""
    amax = search(statistics, (steps + 1) // 2, percentile)
    below, above = statistics.both_sides()
    return -min(below.largest, amax), min(above.largest, amax)


METHOD = RangeMethod(search, between, depends_on_bits=True, even_steps=True)
