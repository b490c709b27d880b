"""Weights that are solved for as `ridge` does, and then rounded to the grids of their nodes, by which they stay.

What a layer gives for the quantized input that it will be given is to be what float's gives of float's: as a function
of the weights that error is a quadratic form about those which `ridge` finds. A rounding keeps the form small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from swin_quant.base.schema import check_fields, within
from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.kind import Pass, Workpiece
from swin_quant.quant.passes.layerwise import Problem, solve_layers
from swin_quant.quant.passes.ridge import corrected, damped
from swin_quant.quant.passes.rounding import nearest_where_better
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.ranges import weight_range

Rounding = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""Levels [out, in] for a weight [out, in], the covariance [in, in] of its inputs, a scale [out, 1], qmin and qmax."""


@dataclass(frozen=True)
class OnGridOptions:
    """`damp`: what is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01

    def __post_init__(self) -> None:
        check_fields(self)


def on_grid(rounding: Rounding) -> Pass:
    """The pass that rounds so."""

    def run(piece: Workpiece, options: OnGridOptions) -> str:
        return round_layers(piece, options.pictures, options.damp, rounding)

    return Pass(run, OnGridOptions, of_ranges=True)


def round_layers(piece: Workpiece, pictures: int, damp: float, rounding: Rounding) -> str:
    """Solve for the weights of every unit in order and round them; rows for which the nearest levels are better get
    these."""

    def solve(problem: Problem) -> Tensor:
        target, node = corrected(problem), problem.layer._weight_quantizer
        _settle(node, problem.like(target), piece.method)
        qmin, qmax = node.signed_grid
        step = node.range_for(problem.like(target)) / qmax  # float32, as whatever reads the weights computes it
        step = step.view(-1, 1) if step.dim() else step
        scale, levels = step.double().expand(len(target), 1), torch.zeros_like(target)
        for rows in problem.rows:
            hessian, which = damped(rows.whole.covariance, damp), rows.which
            mine = target[which], hessian, scale[which], qmin, qmax
            levels[which] = nearest_where_better(rounding(*mine), *mine)
        return levels.float() * step

    return solve_layers(piece, pictures, solve)


def _settle(node: Quantizer, weight: Tensor, method: Method) -> None:
    """Give the node of `weight` [out, ...] a range that does not follow it: 0-dim, or [out, 1, ...], one a row.

    By the method for its bits; where that has none for weights, the largest magnitude.
    """
    found = weight_range(method.for_bits(node.bits), weight, node)
    node.amax = weight.abs().max() if found is None else found
    node.amax = node.range_for(weight)
