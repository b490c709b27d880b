"""MSE: rounding and clipping together cost least."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swin_quant.quant.fake_quant import TINY_AMAX, UNUSED_AMAX, quantize_dequantize
from swin_quant.quant.range_methods import RangeMethod
from swin_quant.quant.statistics import Statistics, error_integral, grid_error, slope

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
    edges = np.arange(len(counts) + 1) * width
    return float(candidates[np.argmin(grid_error(edges, candidates, qmax) @ slope(counts))])


def between(statistics: Statistics, steps: int, percentile: float) -> tuple[float, float]:
    """The two ends with the least mean squared error: each swept in turn with the other fixed, on merged bins, then on
    all."""
    sides = statistics.both_sides()
    ends = np.array([side.largest for side in sides])
    for merged, span, rounds in ((8, np.geomspace(2.0**-12, 1.0, 128), 2), (1, np.geomspace(1 / 1.07, 1.07, 29), 1)):
        errors = [_Error(side, merged) for side in sides]
        start = ends.copy()
        for end in [1, 0] * rounds:
            swept = np.minimum(start[end] * span, sides[end].largest)
            candidates = np.repeat(ends[:, None], len(swept), axis=1)
            candidates[end] = swept
            if swept.all():
                ends[end] = swept[np.argmin(_error(errors, candidates, steps))]
    return -float(ends[0]), float(ends[1])


def _error(errors: "list[_Error]", ends: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Squared error [candidates] for ends [2, candidates], magnitudes, as `grid_between` rounds the zero point."""
    step = ends.sum(0) / steps
    zero_point = np.minimum(np.rint(ends[0] / step), steps - 1)
    below, above = errors
    return below(zero_point * step, step) + above((steps - zero_point) * step, step)


class _Error:
    """Squared error of one side's values, with `merged` bins as one, clipped at whole steps."""

    def __init__(self, side: Statistics, merged: int) -> None:
        counts = side.counts[: max(len(side.occupied()), 1)]
        counts = np.add.reduceat(counts, np.arange(0, len(counts), merged))
        self.edges, self.weights = np.arange(len(counts) + 1) * (merged * side.width), slope(counts) / side.width

    def __call__(self, ends: NDArray[np.float64], step: NDArray[np.float64]) -> NDArray[np.float64]:
        return error_integral(self.edges, ends, step) @ self.weights


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
