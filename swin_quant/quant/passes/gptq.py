"""GPTQ with asymmetric calibration: solve for weights layer by layer, and round them so that columns compensate.

A layer's target is the float layer's output on float input, while its own input is quantized (Li et al., "GPTAQ",
2025): a quadratic form in the weights. Its minimum, |W (x + d) - (W + dW) x|^2 + lambda |dW|^2, has a closed form, from
covariances alone (Zhong et al., "ERQ", 2024, as activation quantization error reduction). Around it, columns are
rounded one after another (Frantar et al., "GPTQ", 2023). Weights end on the grid of their node, whose range is fixed
first; a bias takes the means.

Memory holds sums over the pictures' tokens, [in, in] a layer, and the activations at one boundary between units. A unit
whose output gets no better stays unchanged.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.calibration import Method
from swin_quant.quant.fake_quant import round_to_grid_
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.trial import (
    copy_state,
    describe_gains,
    gain_db,
    give_state,
    quantized,
    quantized_layers,
    quantizing,
    squared_error,
)
from swin_quant.quant.passes.units import UnitRun, entering, through
from swin_quant.quant.ranges import weight_range
from swin_quant.quant.watch import watching

BLOCK = 128
DAMPS = (0.01, 0.1, 1.0, 10.0)  # values of lambda to try, as shares of the mean variance of the inputs
_PARTS = 4  # one batch of so many judges


@dataclass(frozen=True)
class GptqOptions(SelfChecked):
    """`damp` is added to the variance of every input, as a share of their mean."""

    pictures: Annotated[int, within(least=1)] = 256
    damp: Annotated[float, within(above=0)] = 0.01


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
    """Rows of a layer's weight, bool [out], and their form over all pictures, over three quarters, and over the rest.

    Rows with a bias leave means to the bias. In a convolution, `in` counts the values of a patch.
    """

    which: Tensor
    whole: ErrorForm
    most: ErrorForm
    others: ErrorForm


def damped(covariance: Tensor, damp: float) -> Tensor:
    """The covariance [in, in] with a share of the mean variance added to every variance."""
    return covariance + damp * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)


def ridge(weight: Tensor, form: ErrorForm, damp: float) -> Tensor:
    """The change of `weight` [out, in] with the least error, float64: W d x^T (x x^T + lambda)^-1.

    torch.linalg.LinAlgError if all inputs are zeros.
    """
    factor = torch.linalg.cholesky(damped(form.covariance, damp))
    return torch.cholesky_solve((weight @ form.cross).T, factor).T


def corrected(weight: Tensor, rows: Sequence[Rows]) -> Tensor:
    """A weight [out, in], changed by `ridge` where that is a gain on held-out pictures, which choose lambda."""
    weight = weight.clone()
    for part in rows:
        mine = weight[part.which]
        gains = {damp: part.others.gain(mine, ridge(mine, part.most, damp)) for damp in DAMPS}
        best = max(gains, key=gains.__getitem__)
        if gains[best] > 0:
            weight[part.which] = mine + ridge(mine, part.whole, best)
    return weight


def nearest_where_better(found: Tensor, weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """The `found` levels [out, in] of `weight`, or the nearest levels in rows where these are better.

    hessian: [in, in], positive definite; scale: [out, 1]. A row's error is d H d^T, with d its distance from `weight`.
    """
    nearest = round_to_grid_(weight / scale, qmin, qmax)
    differences = [weight - levels * scale for levels in (found, nearest)]
    errors = [(difference @ hessian * difference).sum(1) for difference in differences]
    return torch.where((errors[0] <= errors[1])[:, None], found, nearest)


def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    """Levels [out, in], column by column, from large to small variance; later columns compensate each one's error.

    Frantar et al., "GPTQ", 2023: the shares are in U, the Cholesky factor of the inverse H^-1 = U^T U. Unless levels
    are clipped, a row's error is at most the sum of (scale / 2 / U_jj) ** 2 (Chen et al., "The Geometry of LLM
    Quantization", 2025). hessian: [in, in], positive definite (else torch.linalg.LinAlgError); scale: [out, 1].
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    # U is the inverse of the upper R with H = R R^T, a reversed Cholesky factor.
    upper = torch.linalg.cholesky(hessian[order][:, order].flip(0, 1)).flip(0, 1)
    factor = torch.linalg.solve_triangular(upper, torch.eye(len(hessian)).to(hessian), upper=True)
    rest, scale = weight.T[order], scale.flatten()  # [in, out]: a column is contiguous
    levels = torch.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        block = slice(start, min(start + BLOCK, len(rest)))
        errors = torch.empty_like(rest[block])
        for j in range(block.start, block.stop):
            levels[j] = round_to_grid_(rest[j] / scale, qmin, qmax)
            error = (rest[j] - levels[j] * scale) / factor[j, j]
            rest[j : block.stop] -= torch.outer(factor[j, j : block.stop], error)
            errors[j - block.start] = error
        rest[block.stop :] -= factor[block, block.stop :].T @ errors
    return levels[order.argsort()].T.contiguous()


def run(context: PassContext, options: GptqOptions) -> str:
    """Solve for the weights of every unit in order and round them; rows take the nearest levels if these are better.

    Convolutions of several groups keep their weights, and so do layers whose weight is read elsewhere too.
    """
    gains: dict[str, float] = {}
    skipped: list[str] = []
    inputs: list[Tensor] = []
    images = context.first(options.pictures)
    for step in context.walk(images, "gptq"):
        inputs, after = inputs or step.inputs, math.inf
        original, outputs = copy_state(step.unit), quantized(step.unit, inputs)
        before = squared_error(outputs, step.outputs)
        try:
            for name in _list_layers(step.unit, inputs):
                _solve(step, name, inputs, options.damp, context.method)
            solved = quantized(step.unit, inputs)
            after = squared_error(solved, step.outputs)
            gains[step.name] = gain_db(before, after)
        except torch.linalg.LinAlgError:
            skipped.append(step.name)
        if not after < before:
            give_state(step.unit, original)
        inputs = solved if after < before else outputs
    note = describe_gains(gains, len(context.units))
    if sum(map(len, images)) == 1:
        note += "; one picture: none is left to judge how far weights may go from float's"
    return f"{note}; no solution in {listed(skipped, 3)}" if skipped else note


def _list_layers(unit: nn.Module, batches: Sequence[Tensor]) -> list[str]:
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
def _solve(step: UnitRun, name: str, inputs: Sequence[Tensor], damp: float, method: Method) -> None:
    """Replace the weight of a layer, fix its range, and shift its bias by the mean error.

    The range is that of the method for its bits; if that has none for weights, it is the largest magnitude.
    """
    layer = cast(QuantizedLayer, step.unit.get_submodule(name))
    original = cast(QuantizedLayer, step.original.get_submodule(name))
    others, most = _sum_tokens(step, layer, original, inputs)
    whole = others + most
    if not all(each.isfinite().all() for each in (whole.xx, whole.dx)):
        raise torch.linalg.LinAlgError("inputs that are not numbers")
    shiftable = layer.shiftable()
    rows = [
        Rows(which, *(side.form(centred) for side in (whole, most, others)))
        for which, centred in ((shiftable, True), (~shiftable, False))
        if which.any()
    ]
    weight = original.weight.detach().double().flatten(1)
    target = corrected(weight, rows)
    node, shaped = layer._weight_quantizer, target.view_as(layer.weight)
    found = weight_range(method.for_bits(node.setting.bits), shaped, node)
    node.amax = shaped.abs().max() if found is None else found
    node.amax = node.range_for(shaped)
    qmin, qmax = node.setting.levels
    width = node.range_for(shaped) / qmax  # float32, as later readers of the weights compute it
    width = width.view(-1, 1) if width.dim() else width
    scale, levels = width.double().expand(len(target), 1), torch.zeros_like(target)
    for part in rows:
        mine = target[part.which], damped(part.whole.covariance, damp), scale[part.which], qmin, qmax
        levels[part.which] = nearest_where_better(gptq(*mine), *mine)
    layer.weight.copy_((levels.float() * width).view_as(layer.weight))
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
def _sum_tokens(
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
            x = layer.columns(layer._input_quantizer(entering(step.unit, layer, [batch])[0]))
        float_x = original.columns(entering(step.original, original, [float_batch])[0])
        assert x is not None and float_x is not None
        x = x.float()
        d = float_x.float() - x
        products = (each.double() for each in (x.sum(0), d.sum(0), x.T @ x, d.T @ x))
        judges = len(pairs) > 1 and number % every == every - 1
        parts[not judges] += _TokenSums(len(x), *products)
    return parts[0], parts[1]


PASS = Pass(run, GptqOptions, sets_ranges=True)
