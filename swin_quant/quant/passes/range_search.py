"""Search ranges by their cost at their unit's output, not at their own node.

Wider and narrower ranges of activations, attention operands and weights are tried node after node in the quantized
unit, on the outputs of the quantized units before it. A channel's error is weighted by its effect on the logits
(`targets`). Each rank tries some ranges of a node, or with `together` some nodes of a unit. (Yuan et al., "PTQ4ViT",
2022: Hessian guided metric, alternating search.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.improve_units import gain_db, improve_units, note_of
from swin_quant.quant.passes.targets import Targets, channel_weights, targets_of
from swin_quant.quant.passes.trial import RANGES, Values, enabled_in, ranges_in, state_of
from swin_quant.quant.passes.units import UnitRun
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.range_methods import mse

_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35)
_BETTER = 0.999  # share of the error before: a smaller gain may be chance


def search_ranges(unit: nn.Module, targets: Targets, rounds: int, together: bool) -> None:
    """Give the nodes of the quantized unit ranges with a smaller error on the training pictures.

    `together`: all nodes choose at once, not one after another. Each rank tries a part, and all choose the same.
    """
    search = _Search(unit, targets)
    for finer in range(rounds):
        search.together(finer) if together else search.in_turn(finer)


class _Search:
    """The nodes of a unit whose ranges are searched, closer to their own in each round, `finer`; and the `least` error
    so far."""

    def __init__(self, unit: nn.Module, targets: Targets) -> None:
        self.unit, self.targets = unit, targets
        self.weights = {
            part._weight_quantizer: part.weight for part in unit.modules() if isinstance(part, QuantizedLayer)
        }
        self.nodes = [node for node in enabled_in(unit) if node.setting.amax is None]
        self.least = self.error()

    def error(self) -> float:
        return self.targets.cost(self.unit, self.targets.training)

    def error_with(self, node: Quantizer, candidate: Tensor) -> float:
        _give(node, candidate)
        return self.error()

    def in_turn(self, finer: int) -> None:
        """Node after node, each with the choices of those before it."""
        for node in self.nodes:
            before, candidates = node.range.clone(), list(self.candidates(node, finer))
            best, self.least = _best([self.error_with(node, one) for one in candidates], self.least)
            _give(node, before if best is None else candidates[best])

    def together(self, finer: int) -> None:
        """Each node with the old ranges of all others; all keep theirs if the choices together are no better."""
        nodes, before = self.nodes, [node.range.clone() for node in self.nodes]
        candidates = [list(self.candidates(node, finer)) for node in nodes]

        def choice(number: int) -> int | None:
            best, _ = _best([self.error_with(nodes[number], each) for each in candidates[number]], self.least)
            _give(nodes[number], before[number])
            return best

        for number, best in enumerate([choice(number) for number in range(len(nodes))]):
            _give(nodes[number], before[number] if best is None else candidates[number][best])
        error = self.error()
        if error < self.least:
            self.least = error
        else:
            for node, value in zip(nodes, before, strict=True):
                _give(node, value)

    def candidates(self, node: Quantizer, finer: int) -> Iterator[Tensor]:
        """Ranges around a node's own, closer in each round."""
        start = node.range.clone()
        if node in self.weights:
            weight = self.weights[node].detach()
            start = node.range_for(weight)
            if not finer:
                yield start
                start = mse.of_weight(weight, *node.setting.levels, node.setting.per_channel)
                yield start
        yield from (start * factor**0.5**finer for factor in _FACTORS)


def _best(errors: Sequence[float], least: float) -> tuple[int | None, float]:
    """The number of the best error clearly below `least`, if any, and the least error."""
    best = None
    for number, error in enumerate(errors):
        if error < least * _BETTER:
            best, least = number, error
    return best, least


def _give(node: Quantizer, value: Tensor) -> None:
    value = value.to(node.range.device)  # rank 0 sends CPU tensors
    if node.setting.symmetric:
        node.amax = value
    else:
        node.bounds = value


@dataclass(frozen=True)
class RangeSearchOptions(SelfChecked):
    """`pictures`: a quarter of them judges; `rounds` through the nodes of a unit; `weighted` and `seed` as in
    `reconstruct`; `together`: the nodes of a unit choose at once, not one after another."""

    pictures: Annotated[int, within(least=1)] = 64
    rounds: Annotated[int, within(least=1)] = 2
    weighted: bool = True
    together: bool = False
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: RangeSearchOptions) -> str:
    """Choose the ranges of every unit in order; a unit whose output is no better on held-out pictures keeps its own."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge ranges on their search picture
        return "one picture: none is left to judge by"
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}

    def improve(step: UnitRun, inputs: Sequence[Tensor], number: int) -> Values:
        return _found(step.unit, targets_of(step, inputs, weights.get(step.name)), options)

    gains = improve_units("range_search", context, images, options, RANGES, improve)
    return note_of(gains, len(context.units))


def _found(unit: nn.Module, targets: Targets, options: RangeSearchOptions) -> Values:
    """The unit's new ranges and its `gain` in dB: 0 if they stay unchanged, NaN if something was not finite."""
    before = ranges_in(state_of(unit))
    error = targets.cost(unit, targets.judging)
    search_ranges(unit, targets, options.rounds, options.together)
    after = targets.cost(unit, targets.judging)
    kept = ranges_in(state_of(unit)) if after < error else before
    return {**kept, "gain": torch.tensor(gain_db(error, after))}


PASS = Pass(run, RangeSearchOptions, keeps_function=True, of_ranges=True)
