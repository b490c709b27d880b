"""How far the logits of one engine are from another's."""

import math
from typing import Any

from torch import Tensor

INT8_LEVELS = 127


def difference(logits: Tensor, reference: Tensor) -> dict[str, Any]:
    """Mean and largest |Δ| of logits [N, classes], the reference's int8 step, top-1 agreement in percent, SQNR in dB.

    The step is amax / 127 of the reference's logits: what int8 would resolve over their range.
    """
    logits, reference = logits.double(), reference.double()
    delta = (logits - reference).abs()
    signal, noise = reference.square().sum().item(), delta.square().sum().item()
    return {
        "mean": delta.mean().item(),
        "max": delta.max().item(),
        "step": reference.abs().max().item() / INT8_LEVELS,
        "agreement": 100 * (logits.argmax(1) == reference.argmax(1)).double().mean().item(),
        "sqnr_db": 10 * math.log10(signal / noise) if signal and noise else None,
    }
