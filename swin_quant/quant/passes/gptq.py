"""GPTQ with asymmetric calibration: round a weight's columns so that they compensate each other's errors.

A layer's target is the float layer's output on float input, while its own input is quantized (Li et al., "GPTAQ",
2025): a quadratic form in the weights, around those of `ridge`. Columns are rounded one after another (Frantar et al.,
"GPTQ", 2023). Weights end on the grid of their node, whose range is fixed first.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.calibration import Method
from swin_quant.quant.fake_quant import round_to_grid_
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.layerwise import Problem, solve_layers
from swin_quant.quant.passes.ridge import corrected, damped
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.ranges import weight_range

BLOCK = 128


def row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """d H d^T for every row d of `difference` [out, in]; hessian: [in, in]. Result [out]."""
    return (difference @ hessian * difference).sum(1)


def nearest(weight: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The nearest level of each weight [out, in]; scale: [out, 1]."""
    return round_to_grid_(weight / scale, qmin, qmax)


def nearest_where_better(found: Tensor, weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The `found` levels [out, in] of `weight`, or the nearest levels in rows where these are better.

    hessian: [in, in], positive definite; scale: [out, 1].
    """
    plain = nearest(weight, scale, qmin, qmax)
    errors = [row_errors(weight - levels * scale, hessian) for levels in (found, plain)]
    return torch.where((errors[0] <= errors[1])[:, None], found, plain)


def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """Levels [out, in], column by column, from large to small variance; later columns compensate each one's error.

    Frantar et al., "GPTQ", 2023: the shares are in U, the Cholesky factor of the inverse H^-1 = U^T U. Unless levels
    are clipped, a row's error is at most the sum of (scale / 2 / U_jj) ** 2 (Chen et al., "The Geometry of LLM
    Quantization", 2025). hessian: [in, in], positive definite (else torch.linalg.LinAlgError); scale: [out, 1].
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    rest, scale = weight.T[order], scale.flatten()  # [in, out]: a column is contiguous
    levels = torch.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        block = slice(start, min(start + BLOCK, len(rest)))
        errors = torch.empty_like(rest[block])
        for j in range(block.start, block.stop):
            levels[j] = round_to_grid_(rest[j] / scale, qmin, qmax)
            error = (rest[j] - levels[j] * scale) / factor[j, j]
            rest[j : block.stop] -= torch.outer(factor[j, j : block.stop], error)
            errors[j - block.start] = error
        rest[block.stop :] -= factor[block, block.stop :].T @ errors
    return levels[order.argsort()].T.contiguous()


def _factor(hessian: Tensor) -> Tensor:
    """Upper U with H^-1 = U^T U: the inverse of the upper R with H = R R^T, a reversed Cholesky factor."""
    upper = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(hessian)).to(hessian), upper=True)


@dataclass(frozen=True)
class GptqOptions(SelfChecked):
    """`damp` is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01


def run(context: PassContext, options: GptqOptions) -> str:
    """Solve for the weights of every unit in order and round them; rows take the nearest levels if these are better."""

    def solve(problem: Problem) -> Tensor:
        target, node = corrected(problem), problem.layer._weight_quantizer
        _settle(node, problem.like(target), context.method)
        qmin, qmax = node.setting.levels
        step = node.range_for(problem.like(target)) / qmax  # float32, as later readers of the weights compute it
        step = step.view(-1, 1) if step.dim() else step
        scale, levels = step.double().expand(len(target), 1), torch.zeros_like(target)
        for rows in problem.rows:
            hessian, which = damped(rows.whole.covariance, options.damp), rows.which
            mine = target[which], hessian, scale[which], qmin, qmax
            levels[which] = nearest_where_better(gptq(*mine), *mine)
        return levels.float() * step

    return solve_layers(context, options.pictures, solve)


def _settle(node: Quantizer, weight: Tensor, method: Method) -> None:
    """Fix the range of the node of `weight` [out, ...]: 0-dim, or [out, 1, ...] per row.

    The method is that for its bits; if that has none for weights, it is the largest magnitude.
    """
    found = weight_range(method.for_bits(node.setting.bits), weight, node)
    node.amax = weight.abs().max() if found is None else found
    node.amax = node.range_for(weight)


PASS = Pass(run, GptqOptions, sets_ranges=True)
