"""Search ranges by their cost at the output of their unit, not at their own node.

Wider and narrower ranges of activations, operands of attention and weights are tried node after node in the quantized
unit, on the outputs of the quantized units before it. An error of a channel weighs as much as the logits change by it
(`fisher`). Each rank tries some ranges of a node, or with `together` some nodes of a unit (`unit_ranges`).
(Yuan et al., "PTQ4ViT", 2022: Hessian guided metric, alternating search.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.distributed import from_main
from swin_quant.base.schema import within
from swin_quant.quant.passes.fisher import channel_weights
from swin_quant.quant.passes.gains import gain_db, note_of
from swin_quant.quant.passes.improve_units import improve_units
from swin_quant.quant.passes.kind import CheckedOptions, Pass, PassContext
from swin_quant.quant.passes.state import AMAX, BOUNDS, Values, state_of
from swin_quant.quant.passes.targets import Targets, targets_of
from swin_quant.quant.passes.unit_ranges import search_ranges
from swin_quant.quant.passes.units import UnitRun


@dataclass(frozen=True)
class RangeSearchOptions(CheckedOptions):
    """`pictures`: a quarter of them judges; `rounds` through the nodes of a unit; `weighted` and `seed` as those of
    `reconstruct`; `together`: the nodes of a unit choose at once, not one after another."""

    pictures: Annotated[int, within(least=1)] = 64
    rounds: Annotated[int, within(least=1)] = 2
    weighted: bool = True
    together: bool = False
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: RangeSearchOptions) -> str:
    """Choose the ranges of every unit in order; one whose output is no better on pictures held out keeps its own."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge ranges by what they were searched on
        return "one picture: none is left to judge by"
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}

    def improve(step: UnitRun, given: Sequence[Tensor], number: int) -> Values:
        return _found(step.unit, targets_of(step, given, weights.get(step.name)), options)

    gains = improve_units("range_search", context, images, options, (AMAX, BOUNDS), improve)
    return note_of(gains, len(context.units))


def _found(unit: nn.Module, targets: Targets, options: RangeSearchOptions) -> Values:
    """The unit's new ranges and its `gain` in dB: 0 if they stay as they were, NaN if something was not finite."""
    before = _of_ranges(state_of(unit))
    error = from_main(targets.cost(unit, targets.judging))
    search_ranges(unit, targets, options.rounds, options.together)
    after = from_main(targets.cost(unit, targets.judging))
    kept = _of_ranges(state_of(unit)) if after < error else before
    return {**kept, "gain": torch.tensor(gain_db(error, after))}


def _of_ranges(state: Values) -> Values:
    """The ranges in a unit's state."""
    return {name: value for name, value in state.items() if name.endswith((AMAX, BOUNDS))}


PASS = Pass(run, RangeSearchOptions, keeps_function=True, of_ranges=True)
