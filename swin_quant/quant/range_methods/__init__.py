"""Range methods: each a file with a METHOD, named as in `--calibrator`; `quant` lists them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from swin_quant.quant import CALIBRATORS
from swin_quant.quant.statistics import Statistics


@dataclass(frozen=True)
class RangeMethod:
    """A way to find the range of a node.

    `search(statistics, levels, percentile)`: the amax of an activation node on a symmetric signed grid of 2 * `levels`
    steps. `between(statistics, steps, percentile)`: low <= 0 <= high for a grid of `steps` with a zero point, from
    statistics with signs. `depends_on_bits`: results hold for that grid alone; `even_steps`: only for grids with equal
    steps, not for float8. `search_weight(weight, qmin, qmax, per_channel)`: the range of a weight [out, ...], 0-dim or
    [out, 1, ...]; None: its largest magnitude.
    """

    search: Callable[[Statistics, int, float], float]
    between: Callable[[Statistics, int, float], tuple[float, float]]
    depends_on_bits: bool = False
    even_steps: bool = False
    search_weight: Callable[[Tensor, int, int, bool], Tensor] | None = None


RANGE_METHODS: dict[str, RangeMethod] = {
    name: importlib.import_module(f"{__name__}.{name}").METHOD for name in CALIBRATORS
}
