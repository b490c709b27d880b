"""A unit's targets: float's outputs, and the quantized unit's error on training and judging pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.quant.passes.trial import quantized
from swin_quant.quant.passes.units import UnitRun

_HELD_OUT = 0.25  # share of the pictures
CHUNK = 32  # pictures at a time


@dataclass(frozen=True)
class Targets:
    """Float's `inputs` and `outputs`, and the inputs from the quantized units before, one picture a row.

    `root`: the root of each channel's weight of squared errors. The last `held_out` rows judge. `gradients` [pictures,
    rank, *output]: directions in which errors of a picture add up (`fisher`); with them, they make up half of the
    error.
    """

    inputs: Tensor
    quantized_inputs: Tensor
    outputs: Tensor
    root: Tensor
    held_out: int
    gradients: Tensor | None = None

    @property
    def training(self) -> range:
        """The rows to learn from: all but those held out, and at least one."""
        return range(max(1, len(self.quantized_inputs) - self.held_out))

    @property
    def judging(self) -> range:
        """The held-out rows."""
        return range(len(self.quantized_inputs) - self.held_out, len(self.quantized_inputs))

    def error(self, outputs: Tensor, rows: Tensor | slice) -> Tensor:
        """Weighted squared error of the unit's outputs for `rows`, 0-dim."""
        wrong = outputs - self.outputs[rows]
        alone = (wrong * self.root).square().sum()
        if self.gradients is None:
            return alone
        along = (self.gradients[rows] * wrong.unsqueeze(1)).flatten(2).sum(2)
        return (alone + along.square().mean(1).sum()) / 2

    def cost(self, unit: nn.Module, rows: range) -> float:
        """The quantized unit's error a picture; infinite if it is not finite."""
        total = 0.0
        for start in range(rows.start, rows.stop, CHUNK):
            some = slice(start, min(start + CHUNK, rows.stop))
            total += self.error(quantized(unit, [self.quantized_inputs[some]])[0], some).item()
        return total / len(rows) if total < math.inf else math.inf


def targets_of(
    step: UnitRun,
    quantized_inputs: Sequence[Tensor],
    weights: Tensor | None,
    gradients: Tensor | None = None,
    rows: int = 1,
) -> Targets:
    """The targets of a unit. `quantized_inputs`: batches from the quantized units before; `weights`: one for each
    channel.

    Each picture has `rows` consecutive rows, which are held out together.
    """
    outputs = torch.cat(step.outputs)
    root = outputs.new_ones(()) if weights is None else _beside(step.unit, outputs, weights.to(outputs.device).sqrt())
    held_out = rows * max(1, round(_HELD_OUT * len(outputs) / rows))
    return Targets(torch.cat(step.inputs), torch.cat(list(quantized_inputs)), outputs, root, held_out, gradients)


def _beside(unit: nn.Module, outputs: Tensor, weights: Tensor) -> Tensor:
    """`weights` [channels] in a shape that multiplies the unit's outputs."""
    dim = getattr(unit, "channel_dim", -1) % outputs.dim()
    return weights.view(-1, *[1] * (outputs.dim() - 1 - dim))
