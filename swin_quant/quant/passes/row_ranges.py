"""Ranges of the rows of a weight by what they cost at the output of its layer.

The error of a product is (w - q) H (w - q)^T a row, with H the covariance of what rows are multiplied with, so that
each row has a best range of its own, and all rows are searched at once.
"""

import torch
from torch import Tensor

from swin_quant.quant.fake_quant import TINY_AMAX, UNUSED_AMAX
from swin_quant.quant.passes.rounding import nearest, row_errors

SHARES = tuple(0.3 + 0.05 * step for step in range(15))  # of a row's largest magnitude: 0.3 to 1


def row_ranges(weight: Tensor, hessian: Tensor, qmin: int, qmax: int) -> Tensor:
    """The clipping range of each row of `weight` [out, in], rounded to nearest, of least error for inputs of covariance
    `hessian` [in, in]: one of SHARES of its largest magnitude. [out, 1]."""
    largest = weight.abs().amax(1, keepdim=True)
    largest = torch.where(largest > TINY_AMAX, largest, UNUSED_AMAX)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in SHARES[::-1]:
        scale = share * largest / qmax
        error = row_errors(weight - nearest(weight, scale, qmin, qmax) * scale, hessian)[:, None]
        best, least = torch.where(error < least, share * largest, best), torch.minimum(error, least)
    return best
