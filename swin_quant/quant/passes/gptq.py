"""GPTQ with asymmetric calibration: rounding by which the columns of a weight make up for each other's errors.

The target of a layer is what float's gives of float's input, and its input is the quantized one that it will be given
(Li et al., "GPTAQ", 2025); columns are rounded one after the other (Frantar et al., "GPTQ", 2023). Weights end on the
grid of their node, whose range is settled first, and stays.
"""

from swin_quant.quant.passes.on_grid import on_grid
from swin_quant.quant.passes.rounding import gptq

PASS = on_grid(gptq)
