"""Block reconstruction: train each quantized unit to give the float unit's outputs (`unit_training`).

Its inputs are the outputs of the quantized units before it. A channel's error is weighted by its effect on the logits
(`fisher`). The result is kept only if the output is better on held-out pictures. (Li et al., "BRECQ", 2021; Wei et al.,
"QDrop", 2022; Wu et al., "FIMA-Q", 2025.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.schema import within
from swin_quant.quant.passes.fisher import channel_weights, picture_gradients
from swin_quant.quant.passes.gains import gain_db, note_of
from swin_quant.quant.passes.improve_units import improve_units
from swin_quant.quant.passes.kind import CheckedOptions, Pass, PassContext
from swin_quant.quant.passes.state import Values, give_state, state_of
from swin_quant.quant.passes.targets import Targets, targets_of
from swin_quant.quant.passes.unit_training import TrainingPlan, train_unit
from swin_quant.quant.passes.units import UnitRun

_PRIME = 7919  # each unit has its own random numbers, so that a resumed pass gives the same bits


@dataclass(frozen=True)
class ReconstructOptions(CheckedOptions):
    """At most `pictures`, with their mirror images if both together are no more (`mirror`); `iterations` a unit, of
    `batch` pictures each; `drop`: the share of values taken from float; `weighted`: weight errors by their effect on
    the logits; `rank`: draws a picture of the directions in which its errors add up (0: none)."""

    pictures: Annotated[int, within(least=1)] = 1024
    iterations: Annotated[int, within(least=1)] = 200
    batch: Annotated[int, within(least=1)] = 32
    drop: Annotated[float, within(least=0, most=0.95)] = 0.5
    mirror: bool = True
    weighted: bool = True
    rank: Annotated[int, within(least=0, most=64)] = 0
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: ReconstructOptions) -> str:
    """Reconstruct the units in order; a unit whose output gets no better stays unchanged."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge units on their training picture
        return "one picture: none is left to judge by"
    rows = 2 if options.mirror and 2 * sum(map(len, images)) <= options.pictures else 1
    images = with_mirrored(images) if rows == 2 else images
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}

    def improve(step: UnitRun, inputs: Sequence[Tensor], number: int) -> Values:
        gradients = None
        if options.rank:
            gradients = picture_gradients(context.original, step.name, images, options.rank, options.seed)
        targets = targets_of(step, inputs, weights.get(step.name), gradients, rows)
        return _improved(step.unit, targets, options, number)

    gains = improve_units("reconstruct", context, images, options, "", improve)
    return note_of(gains, len(gains))


def with_mirrored(images: Sequence[Tensor]) -> list[Tensor]:
    """Each picture, followed by its mirror image."""
    pairs = (torch.stack([batch, batch.flip(-1)], dim=1).flatten(0, 1) for batch in images)
    return [part for both in pairs for part in both.split(len(both) // 2)]


def _improved(unit: nn.Module, targets: Targets, options: ReconstructOptions, number: int) -> Values:
    """The unit's new state and its `gain` in dB: 0 if it stays unchanged, NaN if something was not finite."""
    before = state_of(unit)
    generator = torch.Generator(targets.quantized_inputs.device).manual_seed(_PRIME * options.seed + number)
    plan = TrainingPlan(options.iterations, options.batch, options.drop)
    error, after = targets.cost(unit, targets.judging), math.inf
    if 0 < error < math.inf and train_unit(unit, targets, plan, generator):
        after = targets.cost(unit, targets.judging)
    if after < error:
        return {**state_of(unit), "gain": torch.tensor(gain_db(error, after))}
    give_state(unit, before)
    return {**before, "gain": torch.tensor(math.nan if error and after == math.inf else 0.0)}


PASS = Pass(run, ReconstructOptions, of_ranges=True)
