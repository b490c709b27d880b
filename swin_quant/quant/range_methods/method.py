"""What a range method is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from swin_quant.quant.statistics import Statistics


@dataclass(frozen=True)
class RangeMethod:
    """A way to find the range of a node.

    `search(statistics, levels, percentile)` gives the amax of an activation node from what it saw, on a symmetric
    signed grid of 2 * `levels` steps. `between(statistics, steps, percentile)` gives low <= 0 <= high for a grid of
    `steps` with a zero point, from statistics that know both sides. `of_bits`: the results are for that grid alone;
    `even_steps`: it knows no grid but one of equal steps, as float8 has none.
    `of_weight(weight, qmin, qmax, per_channel)` gives the range of a weight [out, ...], 0-dim or [out, 1, ...]; None:
    it takes its largest magnitude.
    """

    search: Callable[[Statistics, int, float], float]
    between: Callable[[Statistics, int, float], tuple[float, float]]
    of_bits: bool = False
    even_steps: bool = False
    of_weight: Callable[[Tensor, int, int, bool], Tensor] | None = None
