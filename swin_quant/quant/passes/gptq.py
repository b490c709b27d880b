"""GPTQ with asymmetric calibration: columns of a weight are rounded so that they compensate each other's errors.

A layer's target is the float layer's output on float's input, while its own input is quantized (Li et al., "GPTAQ",
2025): a quadratic form in the weights, around those of `ridge`. Columns are rounded one after the other (Frantar et
al., "GPTQ", 2023). Weights end on the grid of their node, whose range is fixed before.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from swin_quant.base.schema import within
from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.kind import CheckedOptions, Pass, PassContext
from swin_quant.quant.passes.layerwise import Problem, solve_layers
from swin_quant.quant.passes.ridge import corrected, damped
from swin_quant.quant.passes.rounding import gptq, nearest_where_better
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.ranges import weight_range


@dataclass(frozen=True)
class GptqOptions(CheckedOptions):
    """`damp` is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01


def run(context: PassContext, options: GptqOptions) -> str:
    """Solve for the weights of every unit in order and round them; rows take the nearest levels if these are better."""

    def solve(problem: Problem) -> Tensor:
        target, node = corrected(problem), problem.layer._weight_quantizer
        _settle(node, problem.like(target), context.method)
        qmin, qmax = node.setting.levels
        step = node.range_for(problem.like(target)) / qmax  # float32, as readers of the weights compute it
        step = step.view(-1, 1) if step.dim() else step
        scale, levels = step.double().expand(len(target), 1), torch.zeros_like(target)
        for rows in problem.rows:
            hessian, which = damped(rows.whole.covariance, options.damp), rows.which
            mine = target[which], hessian, scale[which], qmin, qmax
            levels[which] = nearest_where_better(gptq(*mine), *mine)
        return levels.float() * step

    return solve_layers(context, options.pictures, solve)


def _settle(node: Quantizer, weight: Tensor, method: Method) -> None:
    """Fix the range of the node of `weight` [out, ...]: 0-dim, or [out, 1, ...], one a row.

    By the method for its bits; if that has none for weights, the largest magnitude.
    """
    found = weight_range(method.for_bits(node.setting.bits), weight, node)
    node.amax = weight.abs().max() if found is None else found
    node.amax = node.range_for(weight)


PASS = Pass(run, GptqOptions, of_ranges=True)
