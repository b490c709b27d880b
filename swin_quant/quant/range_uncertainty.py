"""The uncertainty of a range by the choice of pictures: a bootstrap over pictures, in closed form.

A picture's peak is the largest magnitude that a node saw in it. A range covers the peaks of some share of the pictures:
all for the maximum, fewer for a percentile. So a range counts as that quantile of the peaks, whose bootstrap
distribution needs no sampling: the k-th smallest of m peaks, drawn from n with replacement, is at most the i-th if at
least k draws are among the first i, which is binomial. (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
chapter 5.)
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST = 1024  # pictures; with more, uncertainty is no concern
_SHARE = 0.9  # share of nodes whose ranges are at most as uncertain as the total figure
_SLOWEST, _FASTEST = 0.25, 1.0  # uncertainty shrinks with this power of the number of pictures; a mean's with 0.5


def relative_uncertainty(peaks: Sequence[float], amax: float, drawn: int | None = None) -> float:
    """Standard error of a range, relative to it, over samples of `drawn` pictures (None: as many as there are).

    `peaks`: sorted, at least one above zero. 0 for a range below all peaks: it depends on the bulk of values, which is
    alike in all pictures.
    """
    n = len(peaks)
    m = n if drawn is None else drawn
    covered = bisect_right(peaks, amax * (1 + 1e-6))
    if not covered:
        return 0.0
    k = max(1, math.ceil(m * covered / n))
    share = np.diff(_at_most(n, m)[:, k])
    values = np.asarray(peaks)
    mean = float(share @ values)
    return math.sqrt(max(float(share @ np.square(values - mean)), 0.0)) / mean if mean else 0.0


@lru_cache(maxsize=2)
def _at_most(n: int, m: int) -> NDArray[np.float64]:
    """[n + 1, m + 1]: the probability that at least k of m draws fall among the first i of n."""
    j = np.arange(m + 1)
    logs = np.array([math.lgamma(count + 1) for count in range(m + 1)])
    choose = logs[m] - logs - logs[::-1]
    inside = np.arange(1, n)[:, None] / n
    table = np.zeros((n + 1, m + 1))
    table[1:n] = np.exp(choose + j * np.log(inside) + (m - j) * np.log1p(-inside))
    table[0, 0] = table[n, m] = 1.0
    return table[:, ::-1].cumsum(1)[:, ::-1]


def sample_uncertainty(peaks: Mapping[str, Sequence[float]], amax: Mapping[str, float]) -> tuple[float, float]:
    """The uncertainty that nine in ten nodes do not exceed, and the power of the number of pictures with which it
    shrinks.

    For at least two pictures; dead nodes do not count.
    """
    alive = [name for name, each in peaks.items() if each[-1] > 0]
    if not alive:
        return 0.0, _FASTEST
    pictures = len(peaks[alive[0]])
    now = [relative_uncertainty(peaks[name], amax[name]) for name in alive]
    fewer = [relative_uncertainty(peaks[name], amax[name], max(pictures // 2, 1)) for name in alive]
    uncertainty, before = (float(np.quantile(each, _SHARE)) for each in (now, fewer))
    halving = math.log(pictures / max(pictures // 2, 1))
    power = math.log(before / uncertainty) / halving if uncertainty > 0 and before > 0 else _FASTEST
    return uncertainty, min(max(power, _SLOWEST), _FASTEST)


def pictures_for(uncertainty: float, power: float, pictures: int, limit: float) -> int:
    """About how many pictures reduce the uncertainty to `limit`, as a power of two."""
    return int(2 ** math.ceil(math.log2(pictures * max(uncertainty / limit, 1.0) ** (1 / power))))
