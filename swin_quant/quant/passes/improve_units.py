"""Improve a network unit by unit, each on the outputs of the quantized units before it, and tell each unit's gain.

Finished units are stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.scratch import compute_key
from swin_quant.quant.passes.trial import Values, copy_state, enabled_in, give_state, quantized
from swin_quant.quant.passes.units import UnitRun, walk

# Maps (unit, its inputs, its number) to the changed values of its state, and its `gain` in dB.
Improve = Callable[[UnitRun, list[Tensor], int], Values]


def improve_units(
    name: str, context: PassContext, images: Sequence[Tensor], options: Any, changes: str | tuple[str, ...], by: Improve
) -> dict[str, float]:
    """Improve each unit that has enabled nodes `by` a function; returns the gains of the pass `name` by unit, in dB.

    `changes`: endings of names in a unit's state that the pass changes. A unit that an interrupted run finished gets
    the stored values.
    """
    key = compute_key([context.model, context.original], images, [name, asdict(options)])
    gains: dict[str, float] = {}
    known = 0
    inputs: list[Tensor] = []
    for number, step in enumerate(walk(context.model, context.units, images, context.original, name)):
        inputs = inputs or step.inputs
        if enabled_in(step.unit):
            file, before, device = f"{key}-{number}", copy_state(step.unit), inputs[0].device
            changed = [value for value in before if value.endswith(changes)]
            found = context.scratch.known(file, [*changed, "gain"], device)
            known += found is not None
            if found is None:
                found = by(step, inputs, number)
                context.scratch.keep(file, found)
            gains[step.name] = found.pop("gain").item()
            give_state(step.unit, {**before, **{value: each.to(device) for value, each in found.items()}})
        inputs = quantized(step.unit, inputs)
    if known:
        log.info("%s: %d of %d units were done before", name, known, len(gains))
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
