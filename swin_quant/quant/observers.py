"""Observe a node during calibration: its exact ends and, if wanted, a histogram on either side of zero.

A large tensor is counted by a fixed subset of each picture's values, so that a picture adds the same counts in any
batch and on any rank. The ends come from all values.

A histogram of |x| depends only on the values, not on their order or batches. Its range is [0, 2**exponent) for the
smallest exponent that holds the data, in BINS equal bins. When larger data arrive, the exponent grows and bins are
merged in pairs: the bins of one exponent nest exactly in those of the next. Memory is fixed. Counts are int64: float32
counts, as in `torch.histc`, stop at 2**24 (docs/reference, section 9.3).
"""

import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.statistics import Statistics, join_sides

BINS = 4096
_SMALLEST_EXPONENT = -100  # values below 2**-100 share bin 0: BINS / range must stay finite in float32


@dataclass
class Histogram:
    """counts: int64 [BINS] over [0, 2**exponent). Between half and all of the bins are below the largest value."""

    counts: Tensor
    exponent: int = _SMALLEST_EXPONENT

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Histogram":
        """A histogram without values."""
        return cls(torch.zeros(BINS, dtype=torch.int64, device=device))

    @property
    def width(self) -> float:
        """Width of a bin, in the units of the data."""
        return 2.0**self.exponent / BINS

    def widen(self, exponent: int) -> None:
        """Merge bins in pairs until the range is [0, 2**exponent); a smaller exponent changes nothing."""
        doublings = exponent - self.exponent
        if doublings <= 0:
            return
        merged = min(2**doublings, BINS)
        counts = torch.zeros_like(self.counts)
        counts[: BINS // merged] = self.counts.view(-1, merged).sum(1)
        self.counts, self.exponent = counts, exponent


def add_sides(below: Histogram, above: Histogram, values: Tensor, low: float, high: float) -> None:
    """Count finite `values` from `low` to `high`: magnitudes of negative ones in `below`, all others in `above`."""
    below.widen(exponent_above(max(-low, 0.0)))
    above.widen(exponent_above(max(high, 0.0)))
    values = values.flatten().float()
    negative = values < 0
    bins = values * (BINS / 2.0**above.exponent)
    if below.exponent != above.exponent:
        bins = torch.where(negative, values * (BINS / 2.0**below.exponent), bins)
    # One pass, since splitting the values costs more; 32 bits stay in the cache.
    bins = bins.abs_().to(torch.int32).add_(negative.to(torch.int32), alpha=BINS)
    counts = torch.bincount(bins, minlength=2 * BINS)
    above.counts += counts[:BINS]
    below.counts += counts[BINS:]


def exponent_above(value: float) -> int:
    """The smallest exponent e, within bounds, with value < 2**e."""
    return max(math.frexp(value)[1], _SMALLEST_EXPONENT) if value else _SMALLEST_EXPONENT


class NonFiniteError(SwinQuantError):
    """A tensor holds NaN or infinity; `calibration` finds the module that made it."""


class PictureCount(threading.local):
    """The number of pictures in the batch that this thread runs."""

    pictures = 1


class ActivationObserver:
    """Statistics of one node's tensors, which may come from several threads; `count`: the pictures in a tensor."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        histogram: bool,
        values_per_picture: int | None,  # None: all are counted
        count: PictureCount | None = None,
    ) -> None:
        self.name, self.count, self._lock = name, count or PictureCount(), threading.Lock()
        self.lowest = self.highest = 0.0
        self.histograms = [Histogram.empty(device) for _ in range(2)] if histogram else []  # below zero, and others
        self.values_per_picture = values_per_picture

    def __call__(self, x: Tensor) -> None:
        """Observe x, [B, ...] or [B * windows, ...], pictures outermost; B may be 0."""
        if not x.numel():
            return
        by_picture = x.detach().reshape(self.count.pictures, -1)
        # One call for all pictures: waking threads for every picture costs more than reading twice.
        least, most = torch.stack([by_picture.amin(1), by_picture.amax(1)]).tolist()
        if not math.isfinite(sum(least) + sum(most)):
            raise NonFiniteError(f"node {self.name} saw NaN or infinity during calibration")
        low, high, n = min(least), max(most), by_picture.shape[1]
        spacing = -(-n // (self.values_per_picture or n))
        # Coprime to n, and so to all its factors: no channel, head or token is left out
        while math.gcd(spacing, n) != 1:
            spacing += 1
        with self._lock:
            self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
            if self.histograms:
                below, above = self.histograms
                add_sides(below, above, by_picture[:, ::spacing], low, high)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.lowest, self.highest)

    def statistics(self) -> Statistics:
        """The statistics so far, for a range search; only with histograms."""
        sides = zip(self.histograms, (abs(self.lowest), self.highest), strict=True)
        return join_sides(*(Statistics(side.counts.cpu().numpy(), side.width, end) for side, end in sides))
