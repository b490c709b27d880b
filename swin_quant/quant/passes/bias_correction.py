"""Bias correction: subtract the mean error that rounding a weight causes in each channel from the layer's bias.

Inputs after a ReLU have a mean, so a weight's error shifts the mean of its output, most in depthwise convolutions with
nine weights (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, section
4.2). Every layer is measured on float inputs, in one forward pass: correcting each on the outputs of the quantized
layers before it gained less (20.4 against 23.9 dB on EfficientNet-Lite0, policy `cpu`).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.layer import QuantizedLayer, channels_last
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.trial import quantized_layers, quantizing
from swin_quant.quant.watch import watching


@dataclass(frozen=True)
class BiasOptions(SelfChecked):
    """`pictures`: the number to measure on."""

    pictures: Annotated[int, within(least=1)] = 64


@torch.no_grad()
def run(context: PassContext, options: BiasOptions) -> str:
    """Correct the bias of every layer that has one and whose weight is quantized."""
    layers = {name: layer for name, layer in quantized_layers(context.model).items() if layer.shiftable().any()}
    errors = {}
    for name, layer in layers.items():
        with quantizing(layer):
            errors[name] = layer.weight - layer._weight_quantizer(layer.weight)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        lost = channels_last(module, cast(QuantizedLayer, module).product(inputs[0], errors[name])).flatten(0, -2)
        sums[name] = sums.get(name, 0) + lost.double().sum(0)
        counts[name] += len(lost)

    with watching(layers, look):
        for images in context.first(options.pictures):
            context.model(images)
    for name, total in sums.items():
        layers[name].shift_bias((total / counts[name]).to(layers[name].weight.dtype))
    return f"{len(sums)} biases"


PASS = Pass(run, BiasOptions)
