"""Learned rounding: each weight goes to the level below or above it, whichever is better for the output.

A variable per weight says how far up it goes, through a sigmoid that is stretched and cut at both ends, so that it
reaches them; a loss term that grows less steep pulls it to either. (Nagel et al., "Up or Down? Adaptive Rounding for
Post-Training Quantization", 2020, section 3.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.quant.fake_quant import TINY_AMAX, quantize_dequantize, spacing
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.ranges import weight_range

_LOW, _HIGH = -0.1, 1.1  # the ends of the stretched sigmoid


def rectified(variable: Tensor) -> Tensor:
    """The distance above the level below, 0 to 1."""
    return (variable.sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def variable_of(share: Tensor) -> Tensor:
    """The variable for which `rectified` is `share`, 0 to 1."""
    return torch.logit((share - _LOW) / (_HIGH - _LOW))


def undecided(variable: Tensor, steepness: float) -> Tensor:
    """The sum of 1 - |2 h - 1| ** steepness: 0 for a weight at a level, 1 for one half-way."""
    return (1 - (2 * rectified(variable) - 1).abs().pow(steepness)).sum()


@dataclass(frozen=True)
class Rounding:
    """A weight [out, ...] between the levels of its grid: the levels `below`, from qmin to qmax (`ends`), the distance
    of the next (`gap`, in levels), a level's `step`, the `variable`, and the range `amax` of the grid."""

    below: Tensor
    gap: Tensor
    step: Tensor
    variable: Tensor
    amax: Tensor
    ends: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor, amax: Tensor, qmin: int, qmax: int) -> "Rounding":
        """The rounding that starts at `weight`, clipped to the grid."""
        step = torch.where(amax > TINY_AMAX, amax / qmax, torch.inf)
        level = (weight.detach().float() / step).clamp(qmin, qmax)
        gap = spacing(level, qmin, qmax)
        below = (level / gap).floor() * gap
        step = torch.where(amax > TINY_AMAX, step, 0.0)
        return cls(below, gap, step, variable_of((level - below) / gap), amax, (qmin, qmax))

    def soft(self) -> Tensor:
        """The weight between two levels; gradients pass to `variable`."""
        return (self.below + rectified(self.variable) * self.gap).clamp(*self.ends) * self.step

    def hard(self) -> Tensor:
        """The weight at the nearer level, which quantizing leaves as it is, to the bit."""
        return (self.below + (self.variable.detach() >= 0) * self.gap).clamp(*self.ends) * self.step


def rounding_of(layer: QuantizedLayer) -> Rounding:
    """The weight of a layer on the grid of its node; of two ranges, the one in effect and that of least squared error,
    it takes what its nearest levels are nearer in. So one that was chosen with the weight stays."""
    node, weight = layer._weight_quantizer, layer.weight.detach()
    ends = node.setting.levels
    candidates = [node.range_for(weight).detach(), weight_range("mse", weight, node)]
    errors = [
        torch.inf if amax is None else (quantize_dequantize(weight, amax, *ends) - weight).square().sum().item()
        for amax in candidates
    ]
    amax = candidates[errors.index(min(errors))]
    assert amax is not None
    return Rounding.of(weight, amax, *ends)
