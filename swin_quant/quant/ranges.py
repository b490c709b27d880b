"""From what a node saw to the clipping range `amax` of it, by any of the range methods."""

from torch import Tensor

from swin_quant.quant.fake_quant import grid
from swin_quant.quant.names import BY_BITS, DEFAULT_PERCENTILE
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.statistics import Statistics


def search_range(method: str, statistics: Statistics, bits: int = 8, percentile: float = DEFAULT_PERCENTILE) -> float:
    """The amax that `method` gives for a symmetric signed grid of `bits` bits (0 only if all values were 0)."""
    if statistics.largest == 0.0:
        return 0.0
    return RANGE_METHODS[method].search(statistics, 2 ** (bits - 1), percentile)


def method_for(bits: int) -> str:
    """The method of BY_BITS for a node of `bits` bits."""
    return BY_BITS[max(least for least in BY_BITS if bits >= least)]


def weight_range(method: str, weight: Tensor, node: Quantizer) -> Tensor | None:
    """The range that `method` gives a weight [out, ...] on the grid of its node: 0-dim, or [out, 1, ...] per channel.

    None where the method has none of its own, and a weight takes its largest magnitude.
    """
    of_weight = RANGE_METHODS[method].of_weight
    return of_weight(weight, *grid(node.bits, node.narrow_range), node.per_channel) if of_weight else None
