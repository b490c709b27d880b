"""A streaming histogram of |x| whose counts depend only on the values, not on their order or batches.

The range is [0, 2**exponent) for the smallest exponent that holds the data, in BINS equal bins. When larger data
arrive, the exponent grows and bins are merged in pairs. The bins of one exponent nest exactly in those of the next, so
order, batch size and ranks do not matter, and memory is fixed. Counts are int64: float32 counts, as in `torch.histc`,
stop at 2**24 (docs/reference, section 9.3).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Count finite `values` (any shape) from `low` to `high`: magnitudes of negative values in `below`, all others in
    `above`."""
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
