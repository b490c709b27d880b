"""Rounding by halves: half of the columns is rounded, and what that does to products the other half makes up for.

Of weights that were just rounded those take their other neighbour by which the error shrinks most, one of a row at a
time; then the rest is solved for, as by ridge regression, and halved again. (Zhong et al., "ERQ", 2024: weight
quantization error reduction. There a gradient chooses what is flipped; here what it wins, which the same sums tell.)
"""

import torch
from torch import Tensor

from swin_quant.quant.fake_quant import spacing
from swin_quant.quant.passes.rounding import nearest

FLIPS = 100  # of a row, in each half, at most


def by_halves(weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """Levels [out, in] for `weight` [out, in], those of columns of large variance first. Arguments: as of `gptq`."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    weight, levels = weight.clone(), torch.empty_like(weight)
    while len(order):
        now, order = order.tensor_split([(len(order) + 1) // 2])
        part, among = weight[:, now], hessian[now]
        levels[:, now] = flipped(part, among[:, now], scale, qmin, qmax)
        if len(order):
            lacking = (part - levels[:, now] * scale) @ among[:, order]
            factor = torch.linalg.cholesky(hessian[order][:, order])
            weight[:, order] += torch.cholesky_solve(lacking.T, factor).T
    return levels


def flipped(weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The levels next to `weight` [out, in]; in each row up to FLIPS of them, if each makes the error less, are those
    on the other side of it."""
    levels = nearest(weight, scale, qmin, qmax)
    other = _both_sides(weight, scale, qmin, qmax).sub_(levels, alpha=2)  # from the nearest level to the one beyond
    other[(levels + other < qmin) | (levels + other > qmax)] = 0
    felt = (weight - levels * scale) @ hessian  # half the gradient of a row's error
    rows, own = torch.arange(len(weight), device=weight.device), hessian.diagonal()
    for _ in range(FLIPS):
        by = other * scale
        gain, column = (2 * by * felt - by.square() * own).max(1)
        row, column = rows[gain > 0], column[gain > 0]
        if not len(row):
            break
        levels[row, column] += other[row, column]
        felt[row] -= by[row, column, None] * hessian[column]
        other[row, column] *= -1
    return levels


def _both_sides(weight: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The sum of the two levels that each weight lies between."""
    inside = (weight / scale).clamp_(qmin, qmax)
    step = spacing(inside, qmin, qmax)
    return (inside / step).floor_().mul_(2).add_(1).mul_(step)
