"""GPTQ with asymmetric calibration: rounding by which the columns of a weight make up for each other's errors.

The target of a layer is what float's gives of float's input, and its input is the quantized one that it will be given
(Li et al., "GPTAQ", 2025); columns are rounded one after the other (Frantar et al., "GPTQ", 2023). Weights end on the
grid of their node, whose range is settled first, and stays.
"""

from dataclasses import dataclass
from typing import Annotated

from swin_quant.base.schema import check_fields, within
from swin_quant.quant.passes.kind import Pass, Workpiece
from swin_quant.quant.passes.on_grid import round_layers
from swin_quant.quant.passes.rounding import gptq


@dataclass(frozen=True)
class GptqOptions:
    """`damp`: what is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01

    def __post_init__(self) -> None:
        check_fields(self)


def run(piece: Workpiece, options: GptqOptions) -> str:
    """Round the weights of every unit in order."""
    return round_layers(piece, options.pictures, options.damp, gptq)


PASS = Pass(run, GptqOptions, of_ranges=True)
