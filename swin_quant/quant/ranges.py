"""The clipping range of a node from its statistics, by any of the range methods."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant import DEFAULT_PERCENTILE
from swin_quant.quant.fake_quant import FP8, TINY_AMAX, UNUSED_AMAX, grid, grid_between
from swin_quant.quant.quantizer import NO_RANGE, Quantizer
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.statistics import Statistics, sqnr_db


@dataclass(frozen=True)
class Range:
    """A node's range: `amax` for a symmetric grid and, if signs were kept, the ends for a grid with a zero point."""

    amax: float
    bounds: tuple[float, float] | None = None

    @property
    def is_dead(self) -> bool:
        """Whether only zeros were seen."""
        return self.amax <= TINY_AMAX

    def give(self, node: Quantizer, device: torch.device | None = None) -> None:
        """Set the range of `node`, by default on its range's device; a dead node gets one that formats can store."""
        if device is None and node.amax is not None:
            device = node.amax.device
        used = Range(UNUSED_AMAX, self.bounds and (-UNUSED_AMAX, UNUSED_AMAX)) if self.is_dead else self
        node.amax = torch.tensor(used.amax, dtype=torch.float32, device=device)
        ends = used.bounds and torch.tensor(used.bounds, dtype=torch.float32, device=device)
        node.bounds = None if ends is None else ends + 0.0  # turns -0.0 into 0.0

    def ends_on(self, node: Quantizer) -> tuple[float, float]:
        """Lower and upper end on the grid of `node`."""
        return (-self.amax, self.amax) if node.setting.symmetric or self.bounds is None else self.bounds

    def sqnr_db(self, statistics: Statistics, node: Quantizer) -> float:
        """Signal to quantization noise of a node's values in this range, in dB, from their histogram."""
        return sqnr_db(statistics, *self.get_grid_arguments(node))

    def get_grid_arguments(self, node: Quantizer) -> tuple[float, int, int]:
        """The arguments amax, qmin and qmax of `fake_quant` for this range on the grid of `node`."""
        qmin, qmax = node.setting.levels
        if node.setting.symmetric:
            return self.amax, qmin, qmax
        if self.bounds is None:
            raise ValueError("a range of magnitudes only")
        low, high = self.bounds
        qmin, qmax = grid_between(low, high, qmax - qmin)
        return (high - low) / (qmax - qmin) * qmax, qmin, qmax


def get_range(node: Quantizer) -> Range:
    """The range of a node; of ranges per row, the largest. SwinQuantError if it was not calibrated."""
    if node.amax is None:
        raise SwinQuantError(NO_RANGE.format(node.name))
    amax = (node.range if node.setting.symmetric else node.amax).max().item()
    if node.bounds is None:
        return Range(amax)
    low, high = node.bounds.tolist()
    return Range(amax, (low, high))


@contextmanager
def keeping_ranges(nodes: Iterable[Quantizer]) -> Iterator[None]:
    """Inside the context, `nodes` may get any range; afterwards each has its own again."""
    before = [(node, node.amax, node.bounds) for node in nodes]
    try:
        yield
    finally:
        for node, amax, bounds in before:
            node.amax, node.bounds = amax, bounds


def search(method: str, statistics: Statistics, node: Quantizer, percentile: float) -> Range:
    """The range that `method` gives a node, with ends if the statistics have signs."""
    bits = node.setting.bits
    bounds = search_bounds(method, statistics, 2**bits - 1, percentile) if statistics.sides else None
    return Range(search_range(method, statistics, bits, percentile, node.setting.format), bounds)


def search_range(
    method: str, statistics: Statistics, bits: int = 8, percentile: float = DEFAULT_PERCENTILE, format: str = "int8"
) -> float:
    """The amax that `method` gives for a symmetric grid with `bits` bits or fp8 (0 only if all values were 0)."""
    if statistics.largest == 0.0:
        return 0.0
    return RANGE_METHODS[method].search(statistics, grid(bits, format=format)[1] + 1, percentile)


def search_bounds(
    method: str, statistics: Statistics, steps: int = 255, percentile: float = DEFAULT_PERCENTILE
) -> tuple[float, float]:
    """low <= 0 <= high that `method` gives for a grid of `steps` with a zero point (equal only if all values were 0).

    ValueError for statistics without signs.
    """
    if statistics.largest == 0.0:
        return 0.0, 0.0
    low, high = RANGE_METHODS[method].between(statistics, steps, percentile)
    if high - low > TINY_AMAX:
        return low, high
    amax = RANGE_METHODS[method].search(statistics, (steps + 1) // 2, percentile)  # nearly all values are 0
    return -amax, amax


def methods_for(nodes: Iterable[Quantizer]) -> list[str]:
    """The range methods that fit if all `nodes` are on: float8 has no equal steps."""
    float8 = any(node.setting.format == FP8 for node in nodes)
    return [name for name, method in RANGE_METHODS.items() if not (float8 and method.even_steps)]


def weight_range(method: str, weight: Tensor, node: Quantizer) -> Tensor | None:
    """The range that `method` gives a weight [out, ...] on its node's grid: 0-dim, or [out, 1, ...] per channel.

    None if the method has none for weights: a weight then takes its largest magnitude.
    """
    search_weight = RANGE_METHODS[method].search_weight
    return search_weight(weight, *node.setting.levels, node.setting.per_channel) if search_weight else None
