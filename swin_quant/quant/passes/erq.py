"""ERQ: ridge regression for the error of activations, then rounding by halves for that of weights.

(Zhong et al., "ERQ", 2024: Aqer, which `ridge` is alone, and Wqer.) Weights end on the grid of their node, whose range
is settled first, and stays.
"""

from dataclasses import dataclass
from typing import Annotated

from swin_quant.base.schema import check_fields, within
from swin_quant.quant.passes.halves import by_halves
from swin_quant.quant.passes.kind import Pass, Workpiece
from swin_quant.quant.passes.on_grid import round_layers


@dataclass(frozen=True)
class ErqOptions:
    """`damp`: what is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01

    def __post_init__(self) -> None:
        check_fields(self)


def run(piece: Workpiece, options: ErqOptions) -> str:
    """Solve for the weights of every unit in order, and round them."""
    return round_layers(piece, options.pictures, options.damp, by_halves)


PASS = Pass(run, ErqOptions, of_ranges=True)
