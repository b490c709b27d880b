"""How far a range would be another one if other pictures had been drawn: a bootstrap over pictures, in closed form.

What is kept of each picture is the largest magnitude that a node saw of it, its peak. A range covers the peaks of some
share of the pictures: of all if it is the maximum, of fewer at a percentile. So it is taken for that quantile of the
peaks, whose bootstrap distribution is known without drawing: of m pictures drawn from n with replacement the k-th
smallest peak is at most the i-th if at least k draws fall among the first i, which is binomial. (Efron and Tibshirani,
"An Introduction to the Bootstrap", 1993, chapter 5, has the method; its ideal form needs no resampling here.)
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST = 1024  # pictures: with more, nobody asks whether they are enough
_MINE = 0.9  # the share of nodes whose ranges spread no more than what is said of all
_SLOWEST, _FASTEST = 0.25, 1.0  # powers of the number of pictures by which a spread shrinks; a mean's is 0.5


def relative_spread(peaks: Sequence[float], amax: float, drawn: int | None = None) -> float:
    """Standard error of a range, as a share of it, over samples of `drawn` pictures (None: of as many as there are).

    `peaks`: of each picture, sorted, at least one above zero. A range below all of them is one of the bulk of values,
    which every picture has: 0.
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


def sample_spread(peaks: Mapping[str, Sequence[float]], amax: Mapping[str, float]) -> tuple[float, float]:
    """The spread that nine in ten nodes keep within, and by which power of the number of pictures it shrinks.

    Of at least two pictures; of nodes that are not dead.
    """
    alive = [name for name, each in peaks.items() if each[-1] > 0]
    if not alive:
        return 0.0, _FASTEST
    pictures = len(peaks[alive[0]])
    now = [relative_spread(peaks[name], amax[name]) for name in alive]
    fewer = [relative_spread(peaks[name], amax[name], max(pictures // 2, 1)) for name in alive]
    spread, before = (float(np.quantile(each, _MINE)) for each in (now, fewer))
    halving = math.log(pictures / max(pictures // 2, 1))
    power = math.log(before / spread) / halving if spread > 0 and before > 0 else _FASTEST
    return spread, min(max(power, _SLOWEST), _FASTEST)


def pictures_for(spread: float, power: float, pictures: int, limit: float) -> int:
    """About how many pictures bring the spread down to `limit`, as a power of two."""
    return int(2 ** math.ceil(math.log2(pictures * max(spread / limit, 1.0) ** (1 / power))))
