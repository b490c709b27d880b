"""MSE: rounding and clipping together cost least."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swin_quant.quant.fake_quant import E4M3, TINY_AMAX, UNUSED_AMAX, quantize_dequantize
from swin_quant.quant.range_methods import RangeMethod
from swin_quant.quant.statistics import Statistics, e4m3_error, error_integral, slope

_SHARES = torch.linspace(0.21, 1.0, 80).tolist()  # shares of a weight's largest magnitude


def search(statistics: Statistics, levels: int, percentile: float) -> float:
    """The amax with the least mean squared error of rounding and clipping together.

    Values are taken as spread evenly inside their bin, and the error is integrated in closed form over each bin: with
    steps finer than a bin, the error at bin centres would depend on an accidental alignment. So merged bins are good
    enough for a first search over 12 octaves; all bins then refine its best.
    """
    counts, width = statistics.occupied(), statistics.width
    rough = np.add.reduceat(counts, np.arange(0, len(counts), 8))
    guess = _least_error(rough, 8 * width, statistics.largest * np.geomspace(2.0**-12, 1.0, 512), levels - 1)
    near = np.geomspace(guess / 1.05, min(guess * 1.05, statistics.largest), 97)
    return _least_error(counts, width, near, levels - 1)


def _least_error(counts: NDArray[np.int64], width: float, candidates: NDArray[np.float64], qmax: int) -> float:
    edges, is_float8 = np.arange(len(counts) + 1) * width, qmax == E4M3[1]
    errors = e4m3_error(edges, candidates) if is_float8 else error_integral(edges, candidates, candidates / qmax)
    return float(candidates[np.argmin(errors @ slope(counts))])


def between(statistics: Statistics, steps: int, percentile: float) -> tuple[float, float]:
    """The two ends with the least mean squared error: each swept in turn, on merged bins, then on all."""
    sides = statistics.both_sides()
    ends = np.array([side.largest for side in sides])
    for merged, span, rounds in ((8, np.geomspace(2.0**-12, 1.0, 128), 2), (1, np.geomspace(1 / 1.07, 1.07, 29), 1)):
        shown = []  # the edges and weights of each side's bins, `merged` as one
        for side in sides:
            counts = side.counts[: max(len(side.occupied()), 1)]
            counts = np.add.reduceat(counts, np.arange(0, len(counts), merged))
            shown.append((np.arange(len(counts) + 1) * (merged * side.width), slope(counts) / side.width))
        start = ends.copy()
        for end in [1, 0] * rounds:
            swept = np.minimum(start[end] * span, sides[end].largest)
            candidates = np.repeat(ends[:, None], len(swept), axis=1)
            candidates[end] = swept
            if not swept.all():
                continue
            step = candidates.sum(0) / steps
            zero_point = np.minimum(np.rint(candidates[0] / step), steps - 1)  # as `grid_between` rounds it
            errors = [
                error_integral(edges, whole_steps * step, step) @ weights
                for (edges, weights), whole_steps in zip(shown, (zero_point, steps - zero_point), strict=True)
            ]
            ends[end] = swept[np.argmin(errors[0] + errors[1])]
    return -float(ends[0]), float(ends[1])


def search_weight(weight: Tensor, qmin: int, qmax: int, per_channel: bool) -> Tensor:
    """The range with the least squared error of a weight [out, ...], 0-dim, or of each of its rows, [out, 1, ...].

    The best of 80 shares of the largest magnitude, each tried on all values.
    """
    weight = weight.detach().float()
    rest = tuple(range(1, weight.dim()))
    largest = weight.abs().amax(rest, keepdim=True) if per_channel else weight.abs().max()
    largest = torch.where(largest > TINY_AMAX, largest, UNUSED_AMAX)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in _SHARES:
        amax = share * largest
        error = (quantize_dequantize(weight, amax, qmin, qmax) - weight).square()
        error = error.sum(rest, keepdim=True) if per_channel else error.sum()
        best, least = torch.where(error < least, amax, best), torch.minimum(error, least)
    return best


METHOD = RangeMethod(search, between, depends_on_bits=True, search_weight=search_weight)
