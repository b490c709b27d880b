"""What a unit is to give, and how far it is from that: on pictures that it is shown, and on others that judge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swin_quant.quant.passes.trial import quantized
from swin_quant.quant.passes.units import UnitRun

_HELD_OUT = 0.25  # of the pictures
CHUNK = 32  # pictures at a time


@dataclass(frozen=True)
class Lesson:
    """A picture a row: float's `inputs`, the input that is `given`, the `targets`; the `root` of what the square of an
    error in each channel weighs; how many pictures are `held_out`, the last ones; `gradients` [pictures, rank, *target]
    along which the errors of a picture add up (`fisher`): then they are half of what counts."""

    inputs: Tensor
    given: Tensor
    targets: Tensor
    root: Tensor
    held_out: int
    gradients: Tensor | None = None

    @property
    def shown(self) -> range:
        """The rows to learn from: all but those held out, if there are two."""
        return range(max(1, len(self.given) - self.held_out))

    @property
    def judging(self) -> range:
        """The rows that are held out."""
        return range(len(self.given) - self.held_out, len(self.given))

    def error(self, outputs: Tensor, rows: Tensor | slice) -> Tensor:
        """Weighted squared error of what the unit gives for `rows`, 0-dim."""
        wrong = outputs - self.targets[rows]
        alone = (wrong * self.root).square().sum()
        if self.gradients is None:
            return alone
        along = (self.gradients[rows] * wrong.unsqueeze(1)).flatten(2).sum(2)
        return (alone + along.square().mean(1).sum()) / 2

    def cost(self, unit: nn.Module, rows: range) -> float:
        """The error a picture of the quantized unit; infinite if it is not finite."""
        total = 0.0
        for start in range(rows.start, rows.stop, CHUNK):
            some = slice(start, min(start + CHUNK, rows.stop))
            total += self.error(quantized(unit, [self.given[some]])[0], some).item()
        return total / len(rows) if total < math.inf else math.inf


def lesson_of(
    step: UnitRun,
    given: Sequence[Tensor],
    weights: Tensor | None,
    gradients: Tensor | None = None,
    shown_as: int = 1,
) -> Lesson:
    """What the unit gives in float, of the batches that it is `given` behind quantized units; `weights` of channels.

    `shown_as`: how many rows, one behind the other, are of one picture, which teaches or judges with all of them.
    """
    targets = torch.cat(step.outputs)
    root = targets.new_ones(()) if weights is None else _beside(step.unit, targets, weights.to(targets.device).sqrt())
    held_out = shown_as * max(1, round(_HELD_OUT * len(targets) / shown_as))
    return Lesson(torch.cat(step.inputs), torch.cat(list(given)), targets, root, held_out, gradients)


def _beside(unit: nn.Module, targets: Tensor, weights: Tensor) -> Tensor:
    """`weights` [channels] in a shape that multiplies what a unit gives."""
    dim = getattr(unit, "channel_dim", -1) % targets.dim()
    return weights.view(-1, *[1] * (targets.dim() - 1 - dim))
