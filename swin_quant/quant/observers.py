"""Observe a node during calibration: its exact ends and, if wanted, a histogram on either side of zero.

A large tensor is counted by a fixed subset of each picture's values, so that a picture adds the same counts in any
batch and on any rank. The ends come from all values.
"""

import math

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.histogram import Histogram, add_sides
from swin_quant.quant.statistics import Statistics, of_sides


class NonFiniteError(SwinQuantError):
    """A tensor holds NaN or infinity; `calibration` finds the module that made it."""


class ActivationObserver:
    """Statistics of one node's tensors; `pictures` is the number of pictures in the current batch."""

    def __init__(self, name: str, device: torch.device, histogram: bool, values_per_picture: int | None) -> None:
        self.name = name
        self.pictures = 1
        self.lowest = self.highest = 0.0
        self.peaks: list[float] = []  # the largest magnitude in each picture
        self.below = Histogram.empty(device) if histogram else None
        self.above = Histogram.empty(device) if histogram else None
        self.values_per_picture = values_per_picture

    def __call__(self, x: Tensor) -> None:
        """Observe x, [B, ...] or [B * windows, ...], pictures outermost; B may be 0."""
        if not x.numel():
            return
        by_picture = x.detach().reshape(self.pictures, -1)
        # One call for all pictures: waking threads for every picture costs more than reading twice.
        least, most = torch.stack([by_picture.amin(1), by_picture.amax(1)]).tolist()
        if not math.isfinite(sum(least) + sum(most)):
            raise NonFiniteError(f"node {self.name} saw NaN or infinity during calibration")
        low, high = min(least), max(most)
        self.peaks += map(max, (-end for end in least), most)
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        if self.below is not None and self.above is not None:
            add_sides(self.below, self.above, _subset(by_picture, self.values_per_picture), low, high)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.lowest, self.highest)

    @property
    def histograms(self) -> list[Histogram]:
        """The histograms of both sides, or none."""
        return [side for side in (self.below, self.above) if side is not None]

    def statistics(self) -> Statistics:
        """The statistics so far, for a range search."""
        if not self.histograms:
            raise ValueError("this observer kept no histogram")
        sides = zip(self.histograms, (abs(self.lowest), self.highest), strict=True)
        return of_sides(*(Statistics(side.counts.cpu().numpy(), side.width, end) for side, end in sides))


def _subset(by_picture: Tensor, limit: int | None) -> Tensor:
    """At most `limit` evenly spaced values of each row of [pictures, n]; None takes all.

    The spacing is coprime to n, and so to every factor of n: no channel, head or token is left out.
    """
    n = by_picture.shape[1]
    if limit is None or n <= limit:
        return by_picture
    spacing = -(-n // limit)
    while math.gcd(spacing, n) != 1:
        spacing += 1
    return by_picture[:, ::spacing]
