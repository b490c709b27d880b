"""Improve a network unit by unit, each on the outputs of the quantized units before it, and tell each unit's gain."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.trial import enabled_in, quantized
from swin_quant.quant.passes.units import UnitRun, walk

# Changes a unit, from its inputs and its number; returns the `gain` in dB.
Improve = Callable[[UnitRun, list[Tensor], int], float]


def improve_units(name: str, context: PassContext, images: Sequence[Tensor], by: Improve) -> dict[str, float]:
    """Improve each unit that has enabled nodes `by` a function; returns the gains of the pass `name` by unit, in dB."""
    gains: dict[str, float] = {}
    inputs: list[Tensor] = []
    for number, step in enumerate(walk(context.model, context.units, images, context.original, name)):
        inputs = inputs or step.inputs
        if enabled_in(step.unit):
            gains[step.name] = by(step, inputs, number)
        inputs = quantized(step.unit, inputs)
    return gains


def gain_db(before: float, after: float) -> float:
    """The dB by which a unit's error fell; 0 if it did not, NaN if the unit's output is not finite."""
    if after == math.inf:
        return math.nan
    if not after < before:
        return 0.0
    return 10 * math.log10(before / after) if after else math.inf


def describe_gains(gains: Mapping[str, float], units: int) -> str:
    """The gains of `units` units in words, with the names of units that were not finite and so left unchanged."""
    lost = [name for name, gain in gains.items() if math.isnan(gain)]
    better = [gain for gain in gains.values() if gain > 0]
    finite = [gain for gain in better if gain < math.inf]
    words = f"{len(better)} of {units} units gain"
    if finite or not better:
        words += f", {max(finite, default=0.0):.1f} dB at most"
    return words + (f"; not finite, and left as they were: {listed(lost, 3)}" if lost else "")
