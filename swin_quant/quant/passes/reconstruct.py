"""Block reconstruction: each unit learns to give, quantized and on what the quantized units before it give, what the
float one gives on float's input (`learning`).

An error of a channel weighs what the logits feel of it (`fisher`). Kept only where the output is better on pictures
that nothing was learned from. (Li et al., "BRECQ", 2021; Wei et al., "QDrop", 2022; Wu et al., "FIMA-Q", 2025.)
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.progress import log
from swin_quant.base.schema import check_fields, within
from swin_quant.quant.passes.fisher import channel_weights, picture_gradients
from swin_quant.quant.passes.gains import gain_db, note_of
from swin_quant.quant.passes.kind import Pass, PassContext
from swin_quant.quant.passes.scratch import key_of
from swin_quant.quant.passes.state import Values, give_state, state_of
from swin_quant.quant.passes.targets import Targets, targets_of
from swin_quant.quant.passes.trial import enabled_in, quantized
from swin_quant.quant.passes.unit_training import TrainingPlan, train_unit
from swin_quant.quant.passes.units import walk

_PRIME = 7919  # a unit's random numbers are its own: going on at a unit gives what going through gives


@dataclass(frozen=True)
class ReconstructOptions:
    """`pictures` at most; `mirror`: each is shown mirrored, too, where that is not more; `iterations` a unit, each of
    `batch` pictures; `drop`: how often a value is float's; `weighted`: errors by what the logits feel of them; `rank`:
    of the matrix that has how those of a picture add up, draws of it a picture (0: they do not); `seed`."""

    pictures: Annotated[int, within(least=1)] = 1024
    iterations: Annotated[int, within(least=1)] = 200
    batch: Annotated[int, within(least=1)] = 32
    drop: Annotated[float, within(least=0, most=0.95)] = 0.5
    mirror: bool = True
    weighted: bool = True
    rank: Annotated[int, within(least=0, most=64)] = 0
    seed: Annotated[int, within(least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)


def run(context: PassContext, options: ReconstructOptions) -> str:
    """Reconstruct the units in order; one whose output is no better for it is left as it was."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge units by what they learned from
        return "one picture: none is left to judge by"
    rows = 2 if options.mirror and 2 * sum(map(len, images)) <= options.pictures else 1
    images = with_mirrored(images) if rows == 2 else images
    key = key_of([context.model, context.original], images, ["reconstruct", asdict(options)])
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}
    gains: dict[str, float] = {}
    known = 0
    given: list[Tensor] = []
    for number, step in enumerate(walk(context.model, context.units, images, context.original)):
        given = given or step.inputs
        if enabled_in(step.unit):
            name = f"{key}-{number}"
            found = context.scratch.known(name, [*state_of(step.unit), "gain"], given[0].device)
            known += found is not None
            if found is None:
                gradients = (
                    picture_gradients(context.original, step.name, images, options.rank, options.seed)
                    if options.rank
                    else None
                )
                targets = targets_of(step, given, weights.get(step.name), gradients, rows)
                found = _improved(step.unit, targets, options, number)
                context.scratch.keep(name, found)
            gains[step.name] = found.pop("gain").item()
            give_state(step.unit, found)
        given = quantized(step.unit, given)
    if known:
        log.info("reconstruct: %d of %d units were done before", known, len(gains))
    return note_of(gains, len(gains))


def with_mirrored(images: Sequence[Tensor]) -> list[Tensor]:
    """Each picture and its mirror image behind it."""
    pairs = (torch.stack([batch, batch.flip(-1)], dim=1).flatten(0, 1) for batch in images)
    return [part for both in pairs for part in both.split(len(both) // 2)]


def _improved(unit: nn.Module, targets: Targets, options: ReconstructOptions, number: int) -> Values:
    """The state that the unit is to have, and its `gain` in dB: 0 where it stays what it was, NaN if that is because
    something was not finite."""
    before = state_of(unit)
    generator = torch.Generator(targets.given.device).manual_seed(_PRIME * options.seed + number)
    plan = TrainingPlan(options.iterations, options.batch, options.drop)
    error, after = targets.cost(unit, targets.judging), math.inf
    if 0 < error < math.inf and train_unit(unit, targets, plan, generator):
        after = targets.cost(unit, targets.judging)
    if after < error:
        return {**state_of(unit), "gain": torch.tensor(gain_db(error, after))}
    give_state(unit, before)
    return {**before, "gain": torch.tensor(math.nan if error and after == math.inf else 0.0)}


PASS = Pass(run, ReconstructOptions, of_ranges=True)
