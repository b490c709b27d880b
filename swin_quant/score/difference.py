"""The difference between the outputs of two engines."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from swin_quant.quant.distance import decibels
from swin_quant.quant.outputs import Output, rows

INT8_LEVELS = 127


def difference(logits: Tensor, reference: Tensor) -> dict[str, Any]:
    """Mean and largest |Δ| of logits [N, classes], the reference's int8 step, top-1 agreement in percent, SQNR in dB.

    The step is amax / 127 of the reference's logits: the resolution of int8 over their range.
    """
    logits, reference = logits.double(), reference.double()
    delta = (logits - reference).abs()
    signal, noise = reference.square().sum().item(), delta.square().sum().item()
    return {
        "mean": delta.mean().item(),
        "max": delta.max().item(),
        "step": reference.abs().max().item() / INT8_LEVELS,
        "agreement": 100 * (logits.argmax(1) == reference.argmax(1)).double().mean().item(),
        "sqnr_db": _sqnr(signal, noise),
    }


class OutputDifference:
    """`difference` for embeddings or maps, which have no classes, summed batch by batch; no batch is kept.

    The mean cosine between a picture's values and the reference's replaces the agreement. Differences and step are in
    units of the reference's mean magnitude, since embeddings and maps have any scale.
    """

    def __init__(self) -> None:
        self.size = self.values = self.signal = self.noise = self.total = self.largest = self.top = self.cosines = 0.0
        self.pictures = 0

    def add(self, found: Output, reference: Output) -> None:
        one, other = rows(found).double(), rows(reference).double()
        delta = (one - other).abs()
        self.values += delta.numel()
        self.total += delta.sum().item()
        self.size += other.abs().sum().item()
        self.largest, self.top = max(self.largest, delta.max().item()), max(self.top, other.abs().max().item())
        self.signal += other.square().sum().item()
        self.noise += delta.square().sum().item()
        self.cosines += F.cosine_similarity(one, other).sum().item()
        self.pictures += len(one)

    def figures(self) -> dict[str, Any]:
        unit = self.size / self.values or 1.0
        return {
            "mean": self.total / self.values / unit,
            "max": self.largest / unit,
            "step": self.top / INT8_LEVELS / unit,
            "agreement": None,
            "sqnr_db": _sqnr(self.signal, self.noise),
            "cosine": self.cosines / self.pictures,
        }


def difference_of_outputs(found: Sequence[Output], reference: Sequence[Output]) -> dict[str, Any]:
    """The figures of `OutputDifference` for two lists of batches."""
    sums = OutputDifference()
    for one, other in zip(found, reference, strict=True):
        sums.add(one, other)
    return sums.figures()


def _sqnr(signal: float, noise: float) -> float | None:
    """The SQNR in dB; None if there is no error."""
    return decibels(signal, noise) if signal and noise else None
