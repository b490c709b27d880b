"""Ranges by what they cost at the output of their unit, not at their own node.

Wider and narrower ones are tried node after node, activations, operands of attention and weights, in the quantized unit
and on what the quantized units before it give; an error of a channel weighs what the logits feel of it (`fisher`). Of
several ranks each tries some ranges of a node, or with `together` some nodes of a unit (`unit_ranges`).
(Yuan et al., "PTQ4ViT", 2022: Hessian guided metric, alternating search.)
"""

from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.distributed import from_main
from swin_quant.base.progress import log
from swin_quant.base.schema import check_fields, within
from swin_quant.quant.passes.fisher import channel_weights
from swin_quant.quant.passes.gains import gain_db, note_of
from swin_quant.quant.passes.kind import Pass, PassContext
from swin_quant.quant.passes.scratch import key_of
from swin_quant.quant.passes.state import AMAX, BOUNDS, Values, give_state, state_of
from swin_quant.quant.passes.targets import Targets, targets_of
from swin_quant.quant.passes.trial import enabled_in, quantized
from swin_quant.quant.passes.unit_ranges import search_ranges


@dataclass(frozen=True)
class RangeSearchOptions:
    """`pictures`: a quarter of them judges; `rounds` through the nodes of a unit; `weighted` and `seed` as those of
    `reconstruct`; `together`: the nodes of a unit choose at once, not one after another."""

    pictures: Annotated[int, within(least=1)] = 64
    rounds: Annotated[int, within(least=1)] = 2
    weighted: bool = True
    together: bool = False
    seed: Annotated[int, within(least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)


def run(context: PassContext, options: RangeSearchOptions) -> str:
    """Choose the ranges of every unit in order; one whose output is no better on pictures held out keeps its own."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge ranges by what they were searched on
        return "one picture: none is left to judge by"
    key = key_of([context.model, context.original], images, ["range_search", asdict(options)])
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}
    gains: dict[str, float] = {}
    known = 0
    given: list[Tensor] = []
    for number, step in enumerate(context.walk(options.pictures)):
        given = given or step.inputs
        if enabled_in(step.unit):
            name, before = f"{key}-{number}", state_of(step.unit)
            found = from_main(context.scratch.known(name, [*_of_ranges(before), "gain"], given[0].device))
            known += found is not None
            if found is not None:  # on ranks but the first it comes on the CPU
                found = {key: value.to(given[0].device) for key, value in found.items()}
            else:
                found = _found(step.unit, targets_of(step, given, weights.get(step.name)), options)
                context.scratch.keep(name, found)
            gains[step.name] = found.pop("gain").item()
            give_state(step.unit, {**before, **found})
        given = quantized(step.unit, given)
    if known:
        log.info("range_search: %d of %d units were done before", known, len(gains))
    return note_of(gains, len(context.units))


def _found(unit: nn.Module, targets: Targets, options: RangeSearchOptions) -> Values:
    """The ranges that the unit is to have, and its `gain` in dB: 0 where they are those that it had, NaN if that is
    because something was not finite."""
    before = _of_ranges(state_of(unit))
    error = from_main(targets.cost(unit, targets.judging))
    search_ranges(unit, targets, options.rounds, options.together)
    after = from_main(targets.cost(unit, targets.judging))
    kept = _of_ranges(state_of(unit)) if after < error else before
    return {**kept, "gain": torch.tensor(gain_db(error, after))}


def _of_ranges(state: Values) -> Values:
    """What a search changes of a unit's state."""
    return {name: value for name, value in state.items() if name.endswith((AMAX, BOUNDS))}


PASS = Pass(run, RangeSearchOptions, keeps_function=True, of_ranges=True)
