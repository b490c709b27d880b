"""ERQ: ridge regression for the error of activations, then rounding by halves for that of weights.

(Zhong et al., "ERQ", 2024: Aqer, which `ridge` is alone, and Wqer.) Weights end on the grid of their node, whose range
is settled first, and stays.
"""

from swin_quant.quant.passes.halves import by_halves
from swin_quant.quant.passes.on_grid import on_grid

PASS = on_grid(by_halves)
