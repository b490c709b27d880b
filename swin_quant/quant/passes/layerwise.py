"""Solve for weights layer by layer: each gets quantized inputs and the float layer's outputs as its target.

Memory holds sums over the pictures' tokens, [in, in] a layer, and the activations at one boundary between units. A unit
whose output gets no better stays unchanged.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.improve_units import describe_gains, gain_db
from swin_quant.quant.passes.trial import copy_state, give_state, quantized, quantized_layers, quantizing, squared_error
from swin_quant.quant.passes.units import UnitRun, entering, through
from swin_quant.quant.watch import watching

_PARTS = 4  # one batch of so many judges


@dataclass(frozen=True)
class ErrorForm:
    """A product's error as a function of its inputs, float64 means over tokens, [in, in]: `covariance` of the quantized
    input x, and `cross` of d, float's input minus x, with x."""

    covariance: Tensor
    cross: Tensor

    def gain(self, weight: Tensor, change: Tensor) -> float:
        """|W d|^2 - |W d - dW x|^2."""
        return (2 * change * (weight @ self.cross) - (change @ self.covariance) * change).sum().item()


@dataclass(frozen=True)
class Rows:
    """Rows of a layer's weight, bool [out], and their form over all pictures, over three quarters, and over the
    rest."""

    which: Tensor
    whole: ErrorForm
    most: ErrorForm
    others: ErrorForm


@dataclass(frozen=True)
class Problem:
    """A layer, its float weight [out, in] in float64, and its rows; rows with a bias leave means to the bias. In a
    convolution, `in` counts the values of a patch."""

    layer: QuantizedLayer
    weight: Tensor
    rows: Sequence[Rows]

    def like(self, weight: Tensor) -> Tensor:
        """[out, in] in the shape of the layer's weight."""
        return weight.view_as(self.layer.weight)


# The weight [out, in] for a layer; its node may get another range. torch.linalg.LinAlgError if there is no solution.
Solve = Callable[[Problem], Tensor]


def solve_layers(context: PassContext, pictures: int, solve: Solve) -> str:
    """Replace quantized weights, unit by unit, by those of `solve`, and shift biases by the mean error; returns a note.
    Convolutions of several groups keep their weights, and so do layers whose weight is read elsewhere too."""
    gains: dict[str, float] = {}
    skipped: list[str] = []
    inputs: list[Tensor] = []
    for step in context.walk(pictures):
        inputs = inputs or step.inputs
        original = copy_state(step.unit)
        outputs = quantized(step.unit, inputs)
        before = squared_error(outputs, step.outputs)
        try:
            for name in _running(step.unit, inputs):
                _solve_one(step, name, inputs, solve)
            solved = quantized(step.unit, inputs)
            after = squared_error(solved, step.outputs)
            gains[step.name] = gain_db(before, after)
        except torch.linalg.LinAlgError:
            skipped.append(step.name)
            after = math.inf
        if after < before:
            outputs = solved
        else:
            give_state(step.unit, original)
        inputs = outputs
    note = describe_gains(gains, len(context.units))
    if sum(map(len, context.first(pictures))) == 1:
        note += "; one picture: none is left to judge how far weights may go from float's"
    return f"{note}; no solution in {listed(skipped, 3)}" if skipped else note


def _running(unit: nn.Module, batches: Sequence[Tensor]) -> list[str]:
    """The layers of a unit with quantized weights of their own, in running order, without convolutions of several
    groups."""
    order: dict[str, None] = {}

    def look(name: str, layer: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
        layer = cast(QuantizedLayer, layer)
        if "weight" not in layer.shared_parameters and layer.columns(inputs[0]) is not None:
            order[name] = None

    with watching(quantized_layers(unit), look):
        through(unit, [batch[:1] for batch in batches[:1]])
    return list(order)


@torch.no_grad()
def _solve_one(step: UnitRun, name: str, inputs: Sequence[Tensor], solve: Solve) -> None:
    layer = cast(QuantizedLayer, step.unit.get_submodule(name))
    original = cast(QuantizedLayer, step.original.get_submodule(name))
    others, most = _sums(step, layer, original, inputs)
    whole = others + most
    if not all(each.isfinite().all() for each in (whole.xx, whole.dx)):
        raise torch.linalg.LinAlgError("inputs that are not numbers")
    sides, shiftable = (whole, most, others), layer.shiftable()
    rows = [
        Rows(which, *(side.form(centred) for side in sides))
        for which, centred in ((shiftable, True), (~shiftable, False))
        if which.any()
    ]
    weight = original.weight.detach().double().flatten(1)
    problem = Problem(layer, weight, rows)
    layer.weight.copy_(problem.like(solve(problem)))
    x, d = whole.x / whole.tokens, whole.d / whole.tokens
    lacking = weight @ (x + d) + _bias(original) - layer.weight.double().flatten(1) @ x - _bias(layer)
    layer.shift_bias(lacking.to(layer.weight.dtype))


def _bias(layer: QuantizedLayer) -> Tensor:
    bias = layer.effective_bias()
    return torch.zeros(()).to(layer.weight).double() if bias is None else bias.detach().double()


@dataclass(frozen=True)
class _TokenSums:
    """Sums over tokens of x and d [in], and of their products [in, in]."""

    tokens: int
    x: Tensor
    d: Tensor
    xx: Tensor
    dx: Tensor

    def __add__(self, other: "_TokenSums") -> "_TokenSums":
        return _TokenSums(*map(operator.add, vars(self).values(), vars(other).values()))

    def form(self, centred: bool) -> ErrorForm:
        x, d, xx, dx = (each / max(self.tokens, 1) for each in (self.x, self.d, self.xx, self.dx))
        return ErrorForm(xx - torch.outer(x, x), dx - torch.outer(d, x)) if centred else ErrorForm(xx, dx)


@torch.inference_mode()
def _sums(
    step: UnitRun, layer: QuantizedLayer, original: QuantizedLayer, inputs: Sequence[Tensor]
) -> tuple[_TokenSums, _TokenSums]:
    """Sums over the judging batches, every fourth, and over the others; with fewer than four batches, over pictures. A
    single picture does not judge.

    Products are float32 within a batch and float64 between batches: the sums are inverted later.
    """
    channels = layer.weight[0].numel()
    vector, matrix = (torch.zeros(shape).to(layer.weight).double() for shape in (channels, (channels, channels)))
    parts = [_TokenSums(0, vector, vector, matrix, matrix)] * 2
    pairs = list(zip(inputs, step.inputs, strict=True))
    if len(pairs) < _PARTS:
        pairs = [each for pair in pairs for each in zip(*(batch.split(1) for batch in pair), strict=True)]
    every = min(_PARTS, len(pairs))
    for number, (batch, float_batch) in enumerate(pairs):
        with quantizing(step.unit):
            x = layer._input_quantizer(entering(step.unit, layer, [batch])[0])
        x = _columns(layer, x)
        d = _columns(original, entering(step.original, original, [float_batch])[0]) - x
        products = (each.double() for each in (x.sum(0), d.sum(0), x.T @ x, d.T @ x))
        judges = len(pairs) > 1 and number % every == every - 1
        parts[not judges] += _TokenSums(len(x), *products)
    return parts[0], parts[1]


def _columns(layer: QuantizedLayer, x: Tensor) -> Tensor:
    found = layer.columns(x)
    assert found is not None
    return found.float()
