"""Improve a network unit by unit, each on the outputs of the quantized units before it; finished units are stored."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from swin_quant.base.distributed import from_main
from swin_quant.base.progress import log
from swin_quant.quant.passes.kind import PassContext
from swin_quant.quant.passes.scratch import key_of
from swin_quant.quant.passes.state import Values, give_state, state_of
from swin_quant.quant.passes.trial import enabled_in, quantized
from swin_quant.quant.passes.units import UnitRun, walk

# Maps (unit, its inputs, its number) to the changed values of its state, and its `gain` in dB.
Improve = Callable[[UnitRun, list[Tensor], int], Values]


def improve_units(
    name: str, context: PassContext, images: Sequence[Tensor], options: Any, changes: str | tuple[str, ...], by: Improve
) -> dict[str, float]:
    """Improve each unit that has enabled nodes `by` a function; returns the gains of the pass `name` by unit, in dB.

    `changes`: endings of names in a unit's state that the pass changes. A unit that an interrupted run finished gets
    the stored values, the same on all ranks.
    """
    key = key_of([context.model, context.original], images, [name, asdict(options)])
    gains: dict[str, float] = {}
    known = 0
    inputs: list[Tensor] = []
    for number, step in enumerate(walk(context.model, context.units, images, context.original)):
        inputs = inputs or step.inputs
        if enabled_in(step.unit):
            file, before, device = f"{key}-{number}", state_of(step.unit), inputs[0].device
            changed = [value for value in before if value.endswith(changes)]
            found = from_main(context.scratch.known(file, [*changed, "gain"], device))
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
