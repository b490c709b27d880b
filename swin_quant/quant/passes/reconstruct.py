"""Block reconstruction: train each quantized unit to give the float unit's outputs.

Its inputs are the outputs of the quantized units before it. A channel's error is weighted by its effect on the logits
(`targets`). Trained are the rounding of its weights, the ranges of its activations, its biases and norms. Meanwhile
some quantized values and inputs, drawn each time, are replaced by float's, so that the result fits other pictures too.
Towards the end weights are fixed at levels, and only the rest is trained. The result is kept only if the output is
better on held-out pictures. (Nagel et al., "Up or Down?", 2020; Esser et al., "Learned Step Size Quantization", 2020;
Li et al., "BRECQ", 2021; Wei et al., "QDrop", 2022; Finkelstein et al., "QFT", 2022, for biases and norms; Wu et al.,
"FIMA-Q", 2025.)
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.fake_quant import TINY_AMAX, quantize_dequantize, spacing
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.targets import Targets, channel_weights, improve_units
from swin_quant.quant.passes.trial import describe_gains, enabled_in, quantized_layers
from swin_quant.quant.quantizer import Role, State
from swin_quant.quant.range_methods import mse

_PRIME = 7919  # each unit has its own random numbers
_LOW, _HIGH = -0.1, 1.1  # the ends of the stretched sigmoid


@dataclass(frozen=True)
class ReconstructOptions(SelfChecked):
    """At most `pictures`, with their mirror images if both together are no more (`mirror`); `iterations` a unit, of
    `batch` pictures each; `drop`: the share of values taken from float; `weighted`: weight errors by their effect on
    the logits."""

    pictures: Annotated[int, within(least=1)] = 1024
    iterations: Annotated[int, within(least=1)] = 200
    batch: Annotated[int, within(least=1)] = 32
    drop: Annotated[float, within(least=0, most=0.95)] = 0.5
    mirror: bool = True
    weighted: bool = True
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: ReconstructOptions) -> str:
    """Reconstruct the units in order; a unit whose output gets no better stays unchanged."""
    images = context.first(options.pictures)
    if sum(map(len, images)) < 2:  # it would judge units on their training picture
        return "one picture: none is left to judge by"
    rows = 2 if options.mirror and 2 * sum(map(len, images)) <= options.pictures else 1
    images = with_mirrored(images) if rows == 2 else images
    weights = channel_weights(context.original, list(context.units), images, options.seed) if options.weighted else {}

    def change(unit: nn.Module, targets: Targets, number: int) -> bool:
        generator = torch.Generator(targets.quantized_inputs.device).manual_seed(_PRIME * options.seed + number)
        fixed = [layer for layer in quantized_layers(unit).values() if "weight" in layer.shared_parameters]
        return len(enabled_in(unit)) > len(fixed) and train_unit(unit, targets, options, generator)

    gains = improve_units(context, "reconstruct", images, weights, change, rows)
    return describe_gains(gains, len(gains))


def with_mirrored(images: Sequence[Tensor]) -> list[Tensor]:
    """Each picture, followed by its mirror image."""
    pairs = (torch.stack([batch, batch.flip(-1)], dim=1).flatten(0, 1) for batch in images)
    return [part for both in pairs for part in both.split(len(both) // 2)]


def rectified(variable: Tensor) -> Tensor:
    """The distance above the lower level, 0 to 1."""
    return (variable.sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def undecided(variable: Tensor, steepness: float) -> Tensor:
    """The sum of 1 - |2 h - 1| ** steepness: 0 for a weight at a level, 1 for one half-way."""
    return (1 - (2 * rectified(variable) - 1).abs().pow(steepness)).sum()


@dataclass(frozen=True)
class Rounding:
    """A weight [out, ...] between the levels of its grid: the levels `below`, from qmin to qmax (`ends`), the distance
    to the next (`gap`, in levels), a level's `step`, the `variable`, and the grid's range `amax`."""

    below: Tensor
    gap: Tensor
    step: Tensor
    variable: Tensor
    amax: Tensor
    ends: tuple[int, int]

    @classmethod
    def from_weight(cls, weight: Tensor, amax: Tensor, qmin: int, qmax: int) -> "Rounding":
        """The rounding that starts at `weight`, clipped to the grid."""
        step = torch.where(amax > TINY_AMAX, amax / qmax, torch.inf)
        level = (weight.detach().float() / step).clamp(qmin, qmax)
        gap = spacing(level, qmin, qmax)
        below = (level / gap).floor() * gap
        step = torch.where(amax > TINY_AMAX, step, 0.0)
        variable = torch.logit(((level - below) / gap - _LOW) / (_HIGH - _LOW))  # the inverse of `rectified`
        return cls(below, gap, step, variable, amax, (qmin, qmax))

    def soft(self) -> Tensor:
        """The weight between two levels; gradients pass to `variable`."""
        return (self.below + rectified(self.variable) * self.gap).clamp(*self.ends) * self.step

    def hard(self) -> Tensor:
        """The weight at the nearer level, which quantizing does not change by a bit."""
        return (self.below + (self.variable.detach() >= 0) * self.gap).clamp(*self.ends) * self.step


def make_rounding(layer: QuantizedLayer) -> Rounding:
    """A layer's weight on its node's grid, with the better of two ranges: the one in effect, and that of least squared
    error. A range that was chosen with the weight stays."""
    node, weight = layer._weight_quantizer, layer.weight.detach()
    ends = node.setting.levels
    candidates = [node.range_for(weight).detach(), mse.search_weight(weight, *ends, node.setting.per_channel)]
    errors = [(quantize_dequantize(weight, amax, *ends) - weight).square().sum().item() for amax in candidates]
    return Rounding.from_weight(weight, candidates[errors.index(min(errors))], *ends)


# Shares of the iterations: weights are pulled to levels from the first on, and are at levels from the second on
_WARM, _ROUNDED = 0.2, 0.8
_PULL, _STEEP, _FLAT = 0.01, 20.0, 2.0  # AdaRound's
# Adam's rates at the start; a range's is relative to the range
_ROUNDING_RATE, _RANGE_RATE, _FLOAT_RATE = 0.03, 0.01, 1e-3


@torch.enable_grad()
def train_unit(unit: nn.Module, targets: Targets, options: ReconstructOptions, generator: torch.Generator) -> bool:
    """Train `unit` and leave its weights on the grids of their nodes. False if a loss was not finite."""
    scale = targets.cost(unit, targets.training)

    def batches() -> Iterator[Tensor]:  # endless; each row once an epoch
        while True:
            order = torch.randperm(len(targets.training), generator=generator, device=generator.device)
            yield from order.split(options.batch)

    def coin(x: Tensor) -> Tensor:
        return random_mask(x.shape, options.drop, generator)

    trained = _Trained(unit)
    with ExitStack() as hooks:
        if options.drop:
            for node in trained.nodes:
                hooks.enter_context(node.register_forward_hook(lambda _, x, y: torch.where(coin(x[0]), x[0], y)))
        soft = hooks.enter_context(ExitStack())
        for layer, rounding in trained.roundings.items():
            weight = partial(lambda rounding, *_: rounding.soft(), rounding)
            soft.enter_context(layer._weight_quantizer.register_forward_hook(weight))
        try:
            for number, rows in zip(range(options.iterations), batches(), strict=False):
                done = number / options.iterations
                if done >= _ROUNDED and trained.is_soft:
                    soft.close()
                    trained.round()
                x = targets.quantized_inputs[rows]
                loss = targets.error(unit(torch.where(coin(x), targets.inputs[rows], x)), rows) / (len(rows) * scale)
                if not loss.isfinite():
                    return False
                trained.step(loss + trained.pull(done), left=(1 + math.cos(math.pi * done)) / 2)
            soft.close()
            trained.round()
        finally:
            trained.leave()
    return True


class _Trained:
    """A unit and its trained parameters, without those that another unit, or a further module of this one, reads too;
    layers with such a weight are rounded to nearest."""

    def __init__(self, unit: nn.Module) -> None:
        activations = [node for node in enabled_in(unit) if node.role is not Role.GEMM_WEIGHT]
        self.nodes = [node for node in activations if node.setting.amax is None]
        layers = quantized_layers(unit).values()
        rounded = [layer for layer in layers if "weight" not in layer.shared_parameters]
        self.roundings = {layer: make_rounding(layer) for layer in rounded}
        shared = {id(getattr(part, name)) for part in unit.modules() for name in getattr(part, "shared_parameters", ())}
        own = [one for one in unit.parameters() if id(one) not in shared]
        floating = [one for one in own if one.dim() == 1 and one.requires_grad]
        self.quantized = activations + [layer._weight_quantizer for layer in layers if layer not in self.roundings]
        for node in self.quantized:
            node.state = State.QUANTIZE
        for node in self.nodes:
            node.learn_range()
        self.variables = [rounding.variable.requires_grad_() for rounding in self.roundings.values()]
        rated = [(self.variables, _ROUNDING_RATE), (floating, _FLOAT_RATE)]
        rated += [([node.range], _RANGE_RATE * node.range.detach().abs().max().item()) for node in self.nodes]
        self.rates = [rate for parameters, rate in rated if parameters]
        self.optimizer = torch.optim.Adam([{"params": parameters} for parameters, _ in rated if parameters])
        self.is_soft = True

    def pull(self, done: float) -> Tensor | float:
        """The loss that draws weights to levels after the share `done` of the iterations; its reach grows."""
        if not self.is_soft or done < _WARM:
            return 0.0
        steepness = _STEEP + (_FLAT - _STEEP) * (done - _WARM) / (_ROUNDED - _WARM)
        return _PULL * sum(undecided(variable, steepness) for variable in self.variables)

    def step(self, loss: Tensor, left: float) -> None:
        """One step of Adam with the share `left` of the rates."""
        groups = self.optimizer.param_groups
        learned = [each for group in groups for each in group["params"] if each.requires_grad]
        for each, gradient in zip(learned, torch.autograd.grad(loss, learned, allow_unused=True), strict=True):
            each.grad = gradient
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * left
        self.optimizer.step()
        for node in self.nodes:
            node.hold_range()

    @torch.no_grad()
    def round(self) -> None:
        """Fix weights at levels."""
        if self.is_soft:
            for layer, rounding in self.roundings.items():
                layer.weight.copy_(rounding.hard())
                layer._weight_quantizer.amax = rounding.amax
            for variable in self.variables:
                variable.requires_grad_(False).grad = None
        self.is_soft = False

    def leave(self) -> None:
        """Turn ranges into buffers again, and nodes off."""
        for node in self.nodes:
            node.freeze_range()
        for node in self.quantized:
            node.state = State.OFF
        for group in self.optimizer.param_groups:
            for each in group["params"]:
                each.grad = None


def random_mask(shape: torch.Size, share: float, generator: torch.Generator) -> Tensor:
    """A mask with `share` of it set, to a 256th, from one random byte a value."""
    count = math.prod(shape)
    words = torch.empty(count // 8 + 1, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return (words.view(torch.uint8)[:count] < round(256 * share)).view(shape)


PASS = Pass(run, ReconstructOptions, sets_ranges=True)
