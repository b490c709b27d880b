"""Ranges by what they cost at the output of their unit, not at their own node.

Wider and narrower ones are tried node after node, activations, operands of attention and weights, in the quantized unit
and on what the quantized units before it give; an error of a channel weighs what the logits feel of it (`fisher`). The
rows of a weight are tried together, and with `rows` each with the range that its own product errs least by, too. Of
several ranks each tries some of a node's ranges, or with `together` some of the nodes of a unit, and all choose by what
all found.
(Yuan et al., "PTQ4ViT", 2022: Hessian guided metric, alternating search.)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor, nn

from swin_quant.base.distributed import from_main, shared_out
from swin_quant.base.schema import check_fields, within
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes.fisher import channel_weights
from swin_quant.quant.passes.kind import Pass, Workpiece
from swin_quant.quant.passes.lesson import CHUNK, Lesson, lesson_of
from swin_quant.quant.passes.row_ranges import row_ranges
from swin_quant.quant.passes.state import give_state, state_of
from swin_quant.quant.passes.trial import enabled_in, quantized, quantizing
from swin_quant.quant.passes.units import entering
from swin_quant.quant.quantizer import Quantizer
from swin_quant.quant.ranges import weight_range

_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35)
_BETTER = 0.999  # of the error before

Tried = Callable[[Quantizer], list[Tensor]]


@dataclass(frozen=True)
class RangeSearchOptions:
    """`pictures`: a quarter of them judges; `rounds` through the nodes of a unit; `weighted` and `seed` as those of
    `reconstruct`; `rows`: those of a per-channel weight are tried with a range each, too; `together`: the nodes of a
    unit choose at once, not one after another."""

    pictures: Annotated[int, within(least=1)] = 64
    rounds: Annotated[int, within(least=1)] = 2
    weighted: bool = True
    rows: bool = False
    together: bool = False
    seed: Annotated[int, within(least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)


def run(piece: Workpiece, options: RangeSearchOptions) -> str:
    """Choose the ranges of every unit in order; one whose output is no better on pictures held out keeps its own."""
    images = piece.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge ranges by what they were searched on
        return "one picture: none is left to judge by"
    weights = channel_weights(piece.original, list(piece.units), images, options.seed) if options.weighted else {}
    gains: list[float] = []
    given: list[Tensor] = []
    for step in piece.walk(options.pictures):
        given = given or step.inputs
        if enabled_in(step.unit):
            before, lesson = state_of(step.unit), lesson_of(step, given, weights.get(step.name))
            error = from_main(lesson.cost(step.unit, lesson.judging))
            _search(step.unit, lesson, options)
            after = from_main(lesson.cost(step.unit, lesson.judging))
            if after < error:
                gains.append(10 * math.log10(error / after) if after else math.inf)
            else:
                give_state(step.unit, before)
        given = quantized(step.unit, given)
    return f"{len(gains)} of {len(piece.units)} units gain, {max(gains, default=0.0):.1f} dB at most"


def _search(unit: nn.Module, lesson: Lesson, options: RangeSearchOptions) -> None:
    least = from_main(lesson.cost(unit, lesson.shown))  # ranks whose kernels differ must not choose differently
    layers = {part._weight_quantizer: part for part in unit.modules() if isinstance(part, QuantizedLayer)}
    nodes = [node for node in enabled_in(unit) if node.fixed is None]
    turn = _together if options.together else _in_turn

    def tried(node: Quantizer, finer: int) -> list[Tensor]:
        layer = layers.get(node)
        by_factor = _candidates(node, None if layer is None else layer.weight, finer)
        return [*by_factor, *(_by_row(unit, layer, lesson) if options.rows else ())]

    for finer in range(options.rounds):
        least = turn(unit, lesson, nodes, partial(tried, finer=finer), least)


def _in_turn(unit: nn.Module, lesson: Lesson, nodes: Sequence[Quantizer], tried: Tried, least: float) -> float:
    """Node after node, each beside what those before it chose. Ranks share out the ranges of a node."""
    for node in nodes:
        before, candidates = _range(node), from_main(tried(node))
        errors = shared_out(candidates, partial(_error, unit, lesson, node))
        best, least = _best(errors, least)
        _give(node, before if best is None else candidates[best])
    return least


def _together(unit: nn.Module, lesson: Lesson, nodes: Sequence[Quantizer], tried: Tried, least: float) -> float:
    """Each node beside the ranges that all had before, which stay where what all chose is no better. Ranks share out
    the nodes."""
    before = [_range(node) for node in nodes]
    candidates = from_main([tried(node) for node in nodes])

    def choice(number: int) -> int | None:
        best, _ = _best([_error(unit, lesson, nodes[number], each) for each in candidates[number]], least)
        _give(nodes[number], before[number])
        return best

    for number, best in enumerate(shared_out(range(len(nodes)), choice)):
        _give(nodes[number], before[number] if best is None else candidates[number][best])
    error = from_main(lesson.cost(unit, lesson.shown))
    if error < least:
        return error
    for node, value in zip(nodes, before, strict=True):
        _give(node, value)
    return least


def _best(errors: Sequence[float], least: float) -> tuple[int | None, float]:
    """Which error is clearly below `least` and those in front of it, and the least then."""
    best = None
    for number, error in enumerate(errors):
        if error < least * _BETTER:
            best, least = number, error
    return best, least


def _error(unit: nn.Module, lesson: Lesson, node: Quantizer, candidate: Tensor) -> float:
    _give(node, candidate)
    return lesson.cost(unit, lesson.shown)


def _candidates(node: Quantizer, weight: Tensor | None, finer: int) -> Iterator[Tensor]:
    """Ranges around the one that a node has, nearer to it in each round."""
    start = _range(node)
    if weight is not None:
        start = node.range_for(weight.detach())
        least = weight_range("mse", weight, node)
        if least is not None and not finer:
            yield start
            start = least
            yield start
    yield from (start * factor**0.5**finer for factor in _FACTORS)


def _by_row(unit: nn.Module, layer: QuantizedLayer | None, lesson: Lesson) -> list[Tensor]:
    """Ranges of the rows of a per-channel weight by what each costs at its product; none for convolutions of several
    groups."""
    if layer is None or not layer._weight_quantizer.per_channel:
        return []
    products: list[Tensor] = []
    for given in lesson.given[: lesson.shown.stop].split(CHUNK):
        with quantizing(unit):
            x = layer.columns(layer._input_quantizer(entering(unit, layer, [given])[0]))
        if x is None:
            return []
        products = [sum(products, x.T.double() @ x.double())]
    weight, (qmin, qmax) = layer.weight.detach(), layer._weight_quantizer.signed_grid
    found = row_ranges(weight.double().flatten(1), products[0], qmin, qmax)
    return [found.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1))]


def _range(node: Quantizer) -> Tensor:
    return node.known_range.clone()


def _give(node: Quantizer, value: Tensor) -> None:
    if node.symmetric:
        node.amax = value
    else:
        node.bounds = value


PASS = Pass(run, RangeSearchOptions, keeps_function=True, of_ranges=True)
