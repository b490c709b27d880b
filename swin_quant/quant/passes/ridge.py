"""Ridge regression: the weights with the least error on quantized inputs, against float outputs on float inputs.

The error, |W (x + d) - (W + dW) x|^2 + lambda |dW|^2, has a closed form, from covariances alone (Zhong et al., "ERQ",
2024, as activation quantization error reduction). A bias takes the means. lambda is chosen layer by layer: weights
solved on three quarters of the pictures must be best on the rest.
"""

import torch
from torch import Tensor

from swin_quant.quant.passes.layerwise import ErrorForm, Problem

DAMPS = (0.01, 0.1, 1.0, 10.0)  # values of lambda to try, as shares of the mean variance of the inputs


def damped(covariance: Tensor, damp: float) -> Tensor:
    """The covariance [in, in] with a share of the mean variance added to every variance."""
    return covariance + damp * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)


def ridge(weight: Tensor, form: ErrorForm, damp: float) -> Tensor:
    """The change of `weight` [out, in] with the least error, float64: W d x^T (x x^T + lambda)^-1.

    torch.linalg.LinAlgError if all inputs are zeros.
    """
    factor = torch.linalg.cholesky(damped(form.covariance, damp))
    return torch.cholesky_solve((weight @ form.cross).T, factor).T


def corrected(problem: Problem) -> Tensor:
    """The weight [out, in] of a layer, changed by `ridge` where that is a gain on held-out pictures."""
    weight = problem.weight.clone()
    for rows in problem.rows:
        mine = weight[rows.which]
        gains = {damp: rows.others.gain(mine, ridge(mine, rows.most, damp)) for damp in DAMPS}
        best = max(gains, key=gains.__getitem__)
        if gains[best] > 0:
            weight[rows.which] = mine + ridge(mine, rows.whole, best)
    return weight
