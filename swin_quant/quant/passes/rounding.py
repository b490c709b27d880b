"""Round weights so that later columns compensate the error that a column adds to a product.

The error of weights q instead of w is (w - q) H (w - q)^T a row, with H the covariance of their inputs. All is float64,
as the factors of an inverse covariance need it; levels, too.
"""

import torch
from torch import Tensor

from swin_quant.quant.fake_quant import round_to_grid_

BLOCK = 128


def row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """d H d^T of every row d of `difference` [out, in]; hessian: [in, in]. [out]."""
    return (difference @ hessian * difference).sum(1)


def nearest(weight: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The nearest level of each weight [out, in]; scale: [out, 1]."""
    return round_to_grid_(weight / scale, qmin, qmax)


def nearest_where_better(found: Tensor, weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The `found` levels [out, in] of `weight`, or the nearest in rows where these are better.

    hessian: [in, in], positive definite; scale: [out, 1].
    """
    plain = nearest(weight, scale, qmin, qmax)
    errors = [row_errors(weight - levels * scale, hessian) for levels in (found, plain)]
    return torch.where((errors[0] <= errors[1])[:, None], found, plain)


def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """Levels [out, in], column by column, those of large variance first; later columns take up each one's error.

    Frantar et al., "GPTQ", 2023: U, the Cholesky factor of the inverse H^-1 = U^T U, has their shares. Unless levels
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
    """Upper U with H^-1 = U^T U: the inverse of the upper R with H = R R^T, which a reversed Cholesky factor is."""
    upper = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(hessian)).to(hessian), upper=True)
