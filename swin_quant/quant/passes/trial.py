"""The cost of quantizing one unit, measured at its output, for given weights, with ranges searched each time.

The ranges are close to a calibration's: the least squared error on some of the values, or the largest magnitude. A
unit's weights and ranges are copied before, and restored after.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.quant.fake_quant import TINY_AMAX, UNUSED_AMAX, quantize_dequantize
from swin_quant.quant.fold import unfolding
from swin_quant.quant.layer import QuantizedLayer, all_factors
from swin_quant.quant.passes.units import UnitRun, through
from swin_quant.quant.policy import apply_settings
from swin_quant.quant.quantizer import Quantizer, Role, State, named_nodes
from swin_quant.quant.ranges import keeping_ranges

_VALUES = 1024  # values of a batch and node
_CANDIDATES = 2.0 ** (torch.arange(-36, 1) / 4)  # shares of the largest magnitude, over nine octaves
Values = dict[str, Tensor]
RANGES = _AMAX, _BOUNDS = "._amax", "._bounds"  # endings of ranges' names


class Trial:
    """A unit with its float inputs and outputs. `method`: the calibration's; max takes the largest magnitude.

    `judged`: the same unit on the pictures to measure on; by default those that give the ranges.
    """

    def __init__(self, step: UnitRun, method: str | None, judged: UnitRun | None = None) -> None:
        self.unit, self.inputs, self.method, self.judged = step.unit, step.inputs, method, judged or step
        self.nodes = enabled_in(step.unit)

    def error(self) -> float:
        """Sum of squared errors of the unit's output, quantized by its nodes' settings; infinite if not finite."""
        samples = {node: _Sample() for node in self.nodes if node.role is not Role.GEMM_WEIGHT}
        with keeping_ranges(self.nodes):
            try:
                for node, sample in samples.items():
                    node.state, node.observer = State.CALIBRATE, sample
                through(self.unit, self.inputs)
                for layer in quantized_layers(self.unit).values():
                    layer._weight_quantizer.amax = _alive(layer.weight.detach().abs().max())
                for node, sample in samples.items():
                    sample.set_range(node, self.method)
                for node in self.nodes:
                    node.state, node.observer = State.QUANTIZE, None
                return squared_error(through(self.unit, self.judged.inputs), self.judged.outputs)
            finally:
                for node in self.nodes:
                    node.state, node.observer = State.OFF, None


class _Sample:
    """An observer that keeps some values, and both ends."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.low = self.high = torch.zeros(())

    def __call__(self, x: Tensor) -> None:
        flat = x.detach().reshape(-1).float()
        spacing = max(1, flat.numel() // _VALUES) | 1  # odd, since shapes are full of powers of two
        self.values.append(flat[::spacing])
        low, high = torch.aminmax(flat)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def set_range(self, node: Quantizer, method: str | None) -> None:
        """Give `node` the range with the least squared error; with a zero point, both ends are limited to it."""
        largest = torch.maximum(-self.low, self.high)
        is_alone = method == "max" or largest <= TINY_AMAX
        candidates = largest[None] if is_alone else largest * _CANDIDATES.to(largest.device)
        values = torch.cat(self.values) if self.values else largest[None]

        def error(ranges: Tensor) -> Tensor:
            return (quantize_dequantize(values, ranges, *node.grid) - values).square().sum(-1)

        if node.setting.symmetric:  # one grid: all at once
            errors = error(_alive(candidates)[:, None])
        else:
            each = []
            for amax in candidates:
                self._give(node, amax)
                each.append(error(node.range_for()))
            errors = torch.stack(each)
        self._give(node, candidates[int(errors.argmin())])

    def _give(self, node: Quantizer, amax: Tensor) -> None:
        node.amax = amax = _alive(amax)
        if not node.setting.symmetric:
            ends = torch.stack([torch.maximum(self.low, -amax), torch.minimum(self.high, amax)])
            node.bounds = ends if ends[1] - ends[0] > TINY_AMAX else torch.stack([-amax, amax])


def _alive(amax: Tensor) -> Tensor:
    return amax.where(amax > TINY_AMAX, UNUSED_AMAX)


def enabled_in(unit: nn.Module) -> list[Quantizer]:
    """The enabled nodes of a unit; they keep their names in the network."""
    return [module for module in unit.modules() if isinstance(module, Quantizer) and module.setting.enabled]


def quantized_layers(unit: nn.Module) -> dict[str, QuantizedLayer]:
    """The layers of a unit whose weights are quantized, by their names in it."""
    layers = {name: layer for name, layer in unit.named_modules() if isinstance(layer, QuantizedLayer)}
    return {name: layer for name, layer in layers.items() if layer._weight_quantizer.setting.enabled}


@contextmanager
def quantizing(unit: nn.Module) -> Iterator[None]:
    """Inside the context, the unit is quantized."""
    nodes = enabled_in(unit)
    try:
        for node in nodes:
            node.state = State.QUANTIZE
        yield
    finally:
        for node in nodes:
            node.state = State.OFF


def quantized(unit: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The quantized unit's output for each batch."""
    with quantizing(unit):
        return through(unit, inputs)


@torch.no_grad()
def restore(unit: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Give the unit's parameters the values from `copy_state`."""
    for name, factors in all_factors(unit):
        factors.give(parameters.get(name))
    for name, parameter in unit.named_parameters():
        parameter.copy_(parameters[name])


def squared_error(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Sum over all values, in float64; infinite if one is not finite."""
    total = sum((y.double() - t.double()).square().sum().item() for y, t in zip(outputs, targets, strict=True))
    return total if total < float("inf") else float("inf")


def gain_db(before: float, after: float) -> float:
    """The dB by which a unit's error fell; 0 if it did not, NaN if the unit's output is not finite."""
    if after == math.inf:
        return math.nan
    if not after < before:
        return 0.0
    return 10 * math.log10(before / after) if after else math.inf


def describe_gains(gains: Mapping[str, float], units: int) -> str:
    """The gains of `units` units in words, with the names of units that were not finite and so left unchanged."""
    lost = [name for name, gain in gains.items() if math.isnan(gain)]
    better = [gain for gain in gains.values() if gain > 0]
    finite = [gain for gain in better if gain < math.inf]
    words = f"{len(better)} of {units} units gain"
    if finite or not better:
        words += f", {max(finite, default=0.0):.1f} dB at most"
    return words + (f"; not finite, and left as they were: {listed(lost, 3)}" if lost else "")


def copy_state(module: nn.Module) -> Values:
    """Weights and ranges by name, copied."""
    values: dict[str, Tensor | None] = dict(module.named_parameters())
    for name, node in _nodes(module).items():
        values |= {name + _AMAX: node.amax, name + _BOUNDS: node.bounds}
    return {name: value.detach().clone() for name, value in values.items() if value is not None}


@torch.no_grad()
def give_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore a state of `module` from `copy_state`."""
    restore(module, state)
    for name, node in _nodes(module).items():
        node.amax, node.bounds = state.get(name + _AMAX), state.get(name + _BOUNDS)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """After an error or interrupt inside the context, norms, weights, ranges and settings are as before."""
    unfold = unfolding(model)
    before, settings = copy_state(model), {name: node.setting for name, node in named_nodes(model).items()}
    try:
        yield
    except BaseException:
        unfold()
        give_state(model, before)
        apply_settings(model, settings)
        raise


def _nodes(module: nn.Module) -> dict[str, Quantizer]:
    return {name: each for name, each in module.named_modules() if isinstance(each, Quantizer)}
