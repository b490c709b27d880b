"""A unit's targets: float's outputs, and the quantized unit's error on training and judging pictures.

Errors in a unit's output channels are weighted by their effect on the network's output. A small error e moves the
softmax from float's by a Kullback-Leibler divergence of e^T F e / 2. F, the Fisher matrix, is the mean of g g^T: g is
the gradient of the logits times A r, where A A^T = diag(p) - p p^T is the divergence's Hessian in the logits, and r are
random signs. One backward pass a batch gives the diagonal of F for all units: the cost of independent errors.
(Martens, "New insights and perspectives on the natural gradient method", 2020; Li et al., "BRECQ", 2021.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from swin_quant.quant.layer import channels_last
from swin_quant.quant.outputs import has_classes, rows
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.trial import copy_state, enabled_in, gain_db, give_state, quantized
from swin_quant.quant.watch import watching

_HELD_OUT = 0.25  # share of the pictures
CHUNK = 32  # pictures at a time


@dataclass(frozen=True)
class Targets:
    """Float's `inputs` and `outputs`, and the inputs from the quantized units before, one picture a row.

    `root`: the root of each channel's weight of squared errors. The last `held_out` rows judge.
    """

    inputs: Tensor
    quantized_inputs: Tensor
    outputs: Tensor
    root: Tensor
    held_out: int

    @property
    def training(self) -> range:
        """The rows to learn from: all but those held out, and at least one."""
        return range(max(1, len(self.quantized_inputs) - self.held_out))

    @property
    def judging(self) -> range:
        """The held-out rows."""
        return range(len(self.quantized_inputs) - self.held_out, len(self.quantized_inputs))

    def error(self, outputs: Tensor, rows: Tensor | slice) -> Tensor:
        """Weighted squared error of the unit's outputs for `rows`, 0-dim."""
        wrong = outputs - self.outputs[rows]
        return (wrong * self.root).square().sum()

    def cost(self, unit: nn.Module, rows: range) -> float:
        """The quantized unit's error a picture; infinite if it is not finite."""
        total = 0.0
        for start in range(rows.start, rows.stop, CHUNK):
            some = slice(start, min(start + CHUNK, rows.stop))
            total += self.error(quantized(unit, [self.quantized_inputs[some]])[0], some).item()
        return total / len(rows) if total < math.inf else math.inf


def improve_units(
    context: PassContext,
    work: str,
    images: Sequence[Tensor],
    weights: dict[str, Tensor],
    change: Callable[[nn.Module, Targets, int], bool],
    rows: int = 1,
) -> dict[str, float]:
    """Change each unit that has enabled nodes; returns the gains in dB by unit.

    Inputs are the outputs of the quantized units before it. `change(unit, targets, number)` says whether it was done; a
    unit whose output is no better on held-out pictures is restored. `weights`: of each channel, by unit. Each picture
    has `rows` consecutive rows, which are held out together.
    """
    gains: dict[str, float] = {}
    inputs: list[Tensor] = []
    for number, step in enumerate(context.walk(images, work)):
        unit, inputs = step.unit, inputs or step.inputs
        if enabled_in(unit):
            outputs = torch.cat(step.outputs)
            root = outputs.new_ones(())
            if step.name in weights:
                dim = getattr(unit, "channel_dim", -1) % outputs.dim()
                root = weights[step.name].to(outputs.device).sqrt().view(-1, *[1] * (outputs.dim() - 1 - dim))
            held_out = rows * max(1, round(_HELD_OUT * len(outputs) / rows))
            targets = Targets(torch.cat(step.inputs), torch.cat(inputs), outputs, root, held_out)
            before, error, after = copy_state(unit), targets.cost(unit, targets.judging), math.inf
            if 0 < error < math.inf and change(unit, targets, number):
                after = targets.cost(unit, targets.judging)
            if not after < error:
                give_state(unit, before)
            gains[step.name] = gain_db(error, after) if error else 0.0
        inputs = quantized(unit, inputs)
    return gains


def root_times_signs(logits: Tensor, signs: Tensor) -> Tensor:
    """A r for each row of logits [B, classes] and signs [B, classes]."""
    p = logits.softmax(1)
    root = p.sqrt() * signs
    return root - p * root.sum(1, keepdim=True)


def channel_weights(model: nn.Module, units: Sequence[str], images: Sequence[Tensor], seed: int) -> dict[str, Tensor]:
    """The diagonal of F over the channels of each unit's output [..., channels], by unit: float32, with mean 1.

    For maps and embeddings, which have no softmax, F is that of the squared error: A is the identity.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        part = channels_last(parts[name], gradient.detach()).flatten(0, -2).double().square().sum(0)
        sums[name] = sums[name] + part if name in sums else part

    def look(name: str, module: nn.Module, inputs: object, y: Tensor) -> None:
        y.register_hook(partial(add, name))

    classes = has_classes(model)
    parts = {name: model.get_submodule(name) for name in units}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad(), watching(parts, look):
        for batch in images:
            x = batch.clone().requires_grad_()
            logits = rows(model(x))
            drawn = torch.randint(0, 2, logits.shape, generator=generator).to(logits) * 2 - 1
            if classes:
                drawn = root_times_signs(logits.detach(), drawn)
            torch.autograd.grad((logits * drawn).sum(), x)
    means = {name: total.mean().item() for name, total in sums.items()}
    return {
        name: (total / means[name] if 0 < means[name] < math.inf else torch.ones_like(total)).float()
        for name, total in sums.items()
    }
