"""The difference between the outputs of two engines."""

from collections.abc import Iterable, Sequence
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


def difference_of_outputs(found: Sequence[Output], reference: Sequence[Output]) -> dict[str, Any]:
    """`difference_of_pairs` for two lists of batches."""
    return difference_of_pairs(zip(found, reference, strict=True))


def difference_of_pairs(pairs: Iterable[tuple[Output, Output]]) -> dict[str, Any]:
    """`difference` for embeddings or maps, which have no classes; pairs (output, reference) come batch by batch.

    The mean cosine between a picture's values and the reference's replaces the agreement. Differences and step are in
    units of the reference's mean magnitude, since embeddings and maps have any scale. No batch is kept.
    """
    size = values = signal = noise = total = largest = top = cosines = pictures = 0.0
    for found, reference in pairs:
        one, other = rows(found).double(), rows(reference).double()
        delta = (one - other).abs()
        values, total, size = values + delta.numel(), total + delta.sum().item(), size + other.abs().sum().item()
        largest, top = max(largest, delta.max().item()), max(top, other.abs().max().item())
        signal, noise = signal + other.square().sum().item(), noise + delta.square().sum().item()
        cosines, pictures = cosines + F.cosine_similarity(one, other).sum().item(), pictures + len(one)
    unit = size / values or 1.0
    return {
        "mean": total / values / unit,
        "max": largest / unit,
        "step": top / INT8_LEVELS / unit,
        "agreement": None,
        "sqnr_db": _sqnr(signal, noise),
        "cosine": cosines / pictures,
    }


def _sqnr(signal: float, noise: float) -> float | None:
    """The SQNR in dB; None if there is no error."""
    return decibels(signal, noise) if signal and noise else None
