"""The distance of a quantized model's logits from the float model's, summed over batches."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.records import LossRecord


@dataclass(frozen=True)
class Loss:
    """SQNR of the logits in dB (infinite if equal), the mean Kullback-Leibler divergence of their softmax in nats,
    top-1 agreement in percent, and the expected drop of top-1 accuracy in points.

    The drop needs no labels: where the two models disagree, the float model's probabilities tell how often either class
    is right. It is as good as these probabilities. `drop_error`: its standard error.
    """

    sqnr_db: float
    kl: float
    agreement: float
    drop: float
    drop_error: float = 0.0

    @property
    def most_drop(self) -> float:
        """An upper limit of the drop: two standard errors above it."""
        return self.drop + 2 * self.drop_error

    def record(self) -> LossRecord:
        """The figures for a run card."""
        return cast(LossRecord, asdict(self))

    @property
    def figures(self) -> str:
        """The figures in words."""
        return (
            f"SQNR {self.sqnr_db:.1f} dB, agreement {self.agreement:.2f} %, expected drop {self.drop:.3f} ± "
            f"{self.drop_error:.3f} points"
        )


def make_loss(batches: Sequence[Sequence[float]]) -> Loss:
    """The loss over batches, from the `distance` of each."""
    signal, noise, divergence, agreeing, regret, squares, pictures = summed(batches)
    return Loss(
        decibels(signal, noise),
        max(0.0, divergence / pictures),
        100 * agreeing / pictures,
        100 * regret / pictures,
        100 * math.sqrt(max(0.0, squares - regret**2 / pictures)) / pictures,
    )


def summed(batches: Sequence[Sequence[float]]) -> list[float]:
    """Each figure's sum over batches, in their order."""
    return np.sum(batches, axis=0).tolist()


def distance(logits: Tensor, expected: Tensor) -> list[float]:
    """Sums over a batch of logits [B, classes]: signal, noise, divergence, agreeing pictures, lost probability, its
    squares, pictures. SwinQuantError for logits that are not finite, which the figures would hide."""
    for whose, values in (("float", expected), ("quantized", logits)):
        if not values.isfinite().all():
            raise SwinQuantError(f"logits of the {whose} model are not finite: check the checkpoint and the pictures")
    logits, expected = logits.double(), expected.double()
    target, guess = expected.log_softmax(1), logits.log_softmax(1)
    chosen, wanted = logits.argmax(1, keepdim=True), expected.argmax(1, keepdim=True)
    divergence = (target.exp() * (target - guess)).sum().item()
    regret = target.exp().gather(1, wanted) - target.exp().gather(1, chosen)
    given_up = regret.sum().item(), regret.square().sum().item()
    return [*noise(logits, expected), divergence, (chosen == wanted).sum().item(), *given_up, len(logits)]


def noise(values: Tensor, expected: Tensor) -> tuple[float, float]:
    """The sums of squares of the expected values, and of the error."""
    return expected.square().sum().item(), (values - expected).square().sum().item()


def decibels(signal: float, error: float) -> float:
    """SQNR in dB; infinite without an error or a signal, -infinite for sums that are not finite."""
    if not math.isfinite(signal) or not math.isfinite(error):
        return -math.inf
    return 10 * math.log10(signal / error) if signal and error else math.inf
