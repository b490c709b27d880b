"""Bias correction: what rounding adds to a channel on average is taken off in a bias behind it.

The mean over pictures and tokens of float less quantized output, channel by channel (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2; for vision transformers Gong et al.,
"Bias compensation", 2024). Sequential: each layer is measured on what the corrected, quantized ones before it give, and
the last parameter that is added to what a unit gives (`Workpiece.outputs`) takes what is left at the unit's output: the
errors of layers without a bias, and of the units before, which lie in the residual stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from swin_quant.base.schema import check_fields, within
from swin_quant.quant.layer import QuantizedLayer, channels_last
from swin_quant.quant.passes.gains import gain_db, note_of
from swin_quant.quant.passes.kind import Pass, Workpiece
from swin_quant.quant.passes.trial import copied, quantized, quantizing, restore, squared_error
from swin_quant.quant.passes.units import UnitRun, inside, through
from swin_quant.quant.watch import watching


@dataclass(frozen=True)
class BiasOptions:
    """`sequential`: layer by layer on quantized inputs; else all layers of a unit at once, on float's."""

    pictures: Annotated[int, within(least=1)] = 256
    sequential: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


def run(piece: Workpiece, options: BiasOptions) -> str:
    """Correct the biases of every unit in order; a unit whose output is no better for it is left as it was."""
    gains: dict[str, float] = {}
    given: list[Tensor] = []
    for step in piece.walk(options.pictures):
        given = given if given and options.sequential else step.inputs
        original = copied(step.unit)
        outputs = quantized(step.unit, given)
        before = squared_error(outputs, step.outputs)
        _correct(piece, step, given, options)
        corrected = quantized(step.unit, given)
        after = squared_error(corrected, step.outputs)
        gains[step.name] = gain_db(before, after)
        if after < before:
            outputs = corrected
        else:
            restore(step.unit, original)
        given = outputs
    return note_of(gains, len(piece.units))


def _correct(piece: Workpiece, step: UnitRun, given: Sequence[Tensor], options: BiasOptions) -> None:
    final = [part.name for part in piece.outputs if inside(part.name, step.name)]
    layers = {
        name: layer
        for name, layer in step.unit.named_modules()
        if isinstance(layer, QuantizedLayer)
        and layer.effective_bias() is not None
        and f"{step.name}.{name}.bias" not in final
    }
    originals = {name: step.original.get_submodule(name) for name in layers}
    wanted = _means(step.original, originals, step.inputs)
    for some in [{name: layer} for name, layer in layers.items()] if options.sequential else [layers]:
        with quantizing(step.unit):
            means = _means(step.unit, some, given)
        for name, layer in some.items():
            layer.shift_bias(wanted[name] - means[name])
    target = _mean(step.outputs)
    for name in final:
        with torch.no_grad():
            piece.model.get_parameter(name).add_(target - _mean(quantized(step.unit, given)))


def _means(unit: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """float64 [channels] of what each layer gives."""
    seen: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in layers}

    def look(name: str, module: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        y = channels_last(module, y)
        seen[name].append((_sum(y), y.numel() // y.shape[-1]))

    with watching(layers, look):
        through(unit, inputs)
    return {
        name: torch.stack([each for each, _ in sums]).sum(0) / sum(n for _, n in sums) for name, sums in seen.items()
    }


def _mean(outputs: Sequence[Tensor]) -> Tensor:
    """float64 [channels] over all but the last dimension of all batches."""
    return torch.stack([_sum(y) for y in outputs]).sum(0) / sum(y.numel() // y.shape[-1] for y in outputs)


def _sum(y: Tensor) -> Tensor:
    return y.detach().flatten(0, -2).double().sum(0)


PASS = Pass(run, BiasOptions)
