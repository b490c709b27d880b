"""What a node shows while it is calibrated: the exact largest magnitude and, where asked, a histogram of |x|.

A large tensor is counted by a fixed subset of each picture's values, so that a picture adds the same counts in any
batch and on any rank. The largest magnitude always comes from every value.
"""

import math

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.histogram import Histogram
from swin_quant.quant.statistics import Statistics


class NonFiniteError(SwinQuantError):
    """A tensor held NaN or infinity; `calibration` finds the module that made it."""


class ActivationObserver:
    """Streams the tensors of one node. `pictures` is how many pictures the current batch holds."""

    def __init__(self, name: str, device: torch.device, histogram: bool, values_per_picture: int | None) -> None:
        self.name = name
        self.pictures = 1
        self.largest = 0.0
        self.histogram = Histogram.empty(device) if histogram else None
        self.values_per_picture = values_per_picture

    def __call__(self, x: Tensor) -> None:
        """Observe x, [B, ...] or [B * windows, ...], pictures outermost; B may be 0."""
        if not x.numel():
            return
        by_picture = x.detach().reshape(self.pictures, -1)
        low, high = torch.aminmax(by_picture)
        largest = torch.maximum(-low, high).item()
        if not math.isfinite(largest):
            raise NonFiniteError(f"node {self.name} saw NaN or infinity during calibration")
        self.largest = max(self.largest, largest)
        if self.histogram is not None:
            self.histogram.add(_subset(by_picture, self.values_per_picture).abs(), largest)

    def statistics(self) -> Statistics:
        """What was seen so far, for a range search."""
        if self.histogram is None:
            raise ValueError("this observer kept no histogram")
        return Statistics(self.histogram.counts.cpu().numpy(), self.histogram.width, self.largest)


def _subset(by_picture: Tensor, limit: int | None) -> Tensor:
    """At most `limit` evenly spaced values of each row of [pictures, n]; None takes all.

    The spacing is coprime to n and so to every dimension that n is made of: no channel, head or token is left out.
    """
    n = by_picture.shape[1]
    if limit is None or n <= limit:
        return by_picture
    spacing = -(-n // limit)
    while math.gcd(spacing, n) != 1:
        spacing += 1
    return by_picture[:, ::spacing]
