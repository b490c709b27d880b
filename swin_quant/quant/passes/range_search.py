"""Search ranges by their cost at their unit's output, not at their own node.

Wider and narrower ranges of activations, attention operands and weights are tried node after node in the quantized
unit, on the outputs of the quantized units before it. A channel's error is weighted by its effect on the logits
(`targets`). (Yuan et al., "PTQ4ViT", 2022: Hessian guided metric, alternating search.)
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.targets import Targets, channel_weights, improve_units
from swin_quant.quant.passes.trial import describe_gains, enabled_in
from swin_quant.quant.range_methods import mse

_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35)
_BETTER = 0.999  # share of the error before: a smaller gain may be chance


def search_ranges(unit: nn.Module, targets: Targets, rounds: int) -> None:
    """Give the nodes of the quantized unit ranges with a smaller error on the training pictures: node after node, each
    with the choices of those before it, and in each round closer to its own range."""
    weights = {part._weight_quantizer: part.weight for part in unit.modules() if isinstance(part, QuantizedLayer)}
    nodes = [node for node in enabled_in(unit) if node.setting.amax is None]
    least = targets.cost(unit, targets.training)
    for finer in range(rounds):
        for node in nodes:
            key = "amax" if node.setting.symmetric else "bounds"
            best = start = node.range.clone()
            candidates: list[Tensor] = []
            if (weight := weights.get(node)) is not None:
                start = node.range_for(weight.detach())
                if not finer:
                    candidates.append(start)
                    start = mse.search_weight(weight, *node.setting.levels, node.setting.per_channel)
                    candidates.append(start)
            candidates += [start * factor**0.5**finer for factor in _FACTORS]
            for candidate in candidates:
                setattr(node, key, candidate)
                if (error := targets.cost(unit, targets.training)) < least * _BETTER:
                    best, least = candidate, error
            setattr(node, key, best)


@dataclass(frozen=True)
class RangeSearchOptions(SelfChecked):
    """A quarter of the `pictures` judges; `rounds` through a unit's nodes; the others as in `reconstruct`."""

    pictures: Annotated[int, within(least=1)] = 64
    rounds: Annotated[int, within(least=1)] = 2
    weighted: bool = True
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: RangeSearchOptions) -> str:
    """Choose the ranges of every unit in order; a unit whose output is no better on held-out pictures keeps its own."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge ranges on their search picture
        return "one picture: none is left to judge by"
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}

    def change(unit: nn.Module, targets: Targets, number: int) -> bool:
        search_ranges(unit, targets, options.rounds)
        return True

    return describe_gains(improve_units(context, "range_search", images, weights, change), len(context.units))


PASS = Pass(run, RangeSearchOptions, keeps_function=True, sets_ranges=True)
