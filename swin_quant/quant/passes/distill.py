"""Distillation: train the whole quantized network towards the float network's outputs, without labels.

Local passes do not see how later units amplify or compensate errors. Here ranges of activations, biases, norms and
weights (through rounding) take small steps down the error of the logits, of the units' outputs and, if wanted, of the
class probabilities: with few bits some error must stay, and the top classes matter. Float gives targets for any
picture, so each is flipped, moved and mixed with others in every iteration. The result is kept only if the wanted error
is smaller on held-out pictures. These are varied too: unvaried they favour earlier passes, which solved for weights on
them. (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; Esser et al., "Learned Step Size
Quantization", 2020; Finkelstein et al., "QFT: Post-training quantization via fast joint finetuning of all degrees of
freedom", 2022.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from swin_quant.base.progress import track
from swin_quant.base.schema import SelfChecked, within
from swin_quant.quant.outputs import has_classes, rows
from swin_quant.quant.passes import Pass, PassContext
from swin_quant.quant.passes.trial import copy_state, enabled_in, give_state
from swin_quant.quant.passes.units import given_by
from swin_quant.quant.policy import quantizing
from swin_quant.quant.quantizer import Role

_VALUES = 1_300_000  # values of pictures at a time, to bound the activations: 8 pictures of 3 x 224 x 224
_HELD_OUT = 0.25  # share of the pictures
_PRIME = 7919  # each iteration has its own random numbers
_MOVED = 8  # pictures move by up to side / this
_JUDGES = 2**40  # a seed that no iteration has
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # Adam's
_MIXED = 0.5  # this share of pictures gets up to this share of another


@dataclass(frozen=True)
class DistillOptions(SelfChecked):
    """At most `pictures`; `iterations` of `batch` pictures each. Adam's rates at the start: `range_rate`, relative to a
    range; `weight_rate`, relative to the root of a weight's mean square; `float_rate` for biases and norms. `classes`:
    0 counts the logits, 1 the divergence of class probabilities, values between both. Maps and embeddings have no
    softmax and count as logits."""

    pictures: Annotated[int, within(least=1)] = 1024
    iterations: Annotated[int, within(least=1)] = 200
    batch: Annotated[int, within(least=1)] = 32
    range_rate: Annotated[float, within(least=0)] = 2e-3
    float_rate: Annotated[float, within(least=0)] = 2e-4
    weight_rate: Annotated[float, within(least=0)] = 2e-4
    classes: Annotated[float, within(least=0, most=1)] = 0.0
    seed: Annotated[int, within(least=0)] = 0


def run(context: PassContext, options: DistillOptions) -> str:
    """Train the network; it stays unchanged if the wanted error, of logits or classes, is no smaller."""
    options = options if has_classes(context.original) else replace(options, classes=0.0)
    images, before = torch.cat(context.first(options.pictures)), copy_state(context.model)
    if len(images) < 2:  # it would judge itself on its training picture
        return "one picture: none is left to judge by"
    held_out = max(1, round(_HELD_OUT * len(images)))
    judging, shown = images[-held_out:], images[: max(1, len(images) - held_out)]
    judging = varied(judging, torch.Generator().manual_seed(_JUDGES))
    scale = _cost(context, judging)
    if not 0 < scale[0] < math.inf:
        return "nothing to learn from: the logits' error is zero, or not a number"
    done = _learn(context, shown, scale, options)
    judged = torch.tensor((1 - options.classes, 0.0, options.classes))  # the units' outputs are a means, not the end
    after = _weighed(_cost(context, judging), scale, judged).item() if done else math.inf
    if after < 1:
        what = {0.0: "error of logits", 1.0: "divergence of classes"}.get(options.classes, "error of both")
        return f"{what} {-10 * math.log10(after) if after else math.inf:.1f} dB lower on pictures held out"
    give_state(context.model, before)
    return "no gain on pictures held out" if done else "not finite: left as it was"


def _weighed(errors: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """The weighted sum of errors relative to `scale`; 0-dim."""
    whole = torch.where(scale > 0, scale, 1.0)
    return (errors / whole.to(errors) * shares.to(errors)).sum()


def _errors(context: PassContext, x: Tensor) -> Tensor:
    """[3]: errors of the logits and of the units' outputs (mean), relative to the squares of float's, and the
    Kullback-Leibler divergence of the class probabilities from float's, a picture."""

    def relative(found: Tensor, wanted: Tensor) -> Tensor:
        return (found - wanted).square().sum() / wanted.square().sum().clamp_min(torch.finfo(torch.float32).tiny)

    with torch.no_grad():
        output, inside = given_by(context.units, context.original, x)
        wanted = rows(output).float()
    output, parts = given_by(context.units, context.model, x)
    found = rows(output).float()
    each = [relative(parts[name], target) for name, target in inside.items()]
    classes = nn.functional.kl_div(found.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)
    return torch.stack([relative(found, wanted), torch.stack(each).mean(), classes])


@torch.no_grad()
def _cost(context: PassContext, images: Tensor) -> Tensor:
    """The errors of the quantized network a picture; float64 [3]."""
    with quantizing(context.model):
        parts = [_errors(context, x).double().cpu() * len(x) for x in _parts(images)]
    return torch.stack(parts).sum(0) / len(images)


@torch.enable_grad()
def _learn(context: PassContext, images: Tensor, scale: Tensor, options: DistillOptions) -> bool:
    """Train the network. False if a loss was not finite."""
    shares = torch.tensor((1 - options.classes, 1.0, options.classes))
    with quantizing(context.model):
        learner = _Learner(context.model, options)
        try:
            for number in track(range(options.iterations), "distill", options.iterations, "steps"):
                generator = torch.Generator().manual_seed(_PRIME * options.seed + number)
                some = images[torch.randperm(len(images), generator=generator)[: options.batch]]
                for x in _parts(varied(some, generator)):
                    loss = _weighed(_errors(context, x), scale, shares) * len(x) / len(some)
                    if not loss.isfinite():
                        return False
                    learner.feel(loss)
                learner.step(number + 1, left=(1 + math.cos(math.pi * number / options.iterations)) / 2)
        finally:
            for node in learner.nodes:
                node.freeze_range()
    return True


def varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures [B, C, H, W]: some flipped, all moved, some mixed with another of the batch."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(x.device)

    x = torch.where(rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
    most = min(x.shape[-2:]) // _MOVED
    down, right = torch.randint(0, 2 * most + 1, (2,), generator=generator).tolist()
    wide = nn.functional.pad(x, (most,) * 4, mode="reflect")
    x = wide[..., down : down + x.shape[-2], right : right + x.shape[-1]]
    share = _MIXED * rand(len(x), 1, 1, 1) * (rand(len(x), 1, 1, 1) < _MIXED)
    return (1 - share) * x + share * x.roll(1, 0)


class _Learner:
    """The trained parameters of a network, and Adam's moments (Kingma and Ba, 2015)."""

    def __init__(self, model: nn.Module, options: DistillOptions) -> None:
        self.model = model
        self.nodes = [
            node for node in enabled_in(model) if node.setting.amax is None and node.role is not Role.GEMM_WEIGHT
        ]
        floats = [each for each in model.parameters() if each.requires_grad]
        for node in self.nodes:
            node.learn_range()
        ranges = [node.range for node in self.nodes]
        self.parameters: list[Tensor] = [*ranges, *floats]

        def size(x: Tensor) -> float:
            return x.detach().square().mean().sqrt().item()

        self.rates = [options.range_rate * size(each) for each in ranges]
        self.rates += [options.weight_rate * size(each) if each.dim() > 1 else options.float_rate for each in floats]
        self.gradients, self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(3))

    def feel(self, loss: Tensor) -> None:
        """Add the gradients of a part of the loss."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for total, gradient in zip(self.gradients, found, strict=True):
            if gradient is not None:
                total.add_(gradient)

    @torch.no_grad()
    def step(self, number: int, left: float) -> None:
        """Take step `number`, from 1, with the share `left` of the rates."""
        once, twice = (1 - beta**number for beta in _BETAS)
        every = zip(self.parameters, self.rates, self.gradients, self.means, self.squares, strict=True)
        for parameter, rate, gradient, mean, square in every:
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.lerp_(gradient.square(), 1 - _BETAS[1])
            parameter.sub_(rate * left / once * mean / ((square / twice).sqrt() + _EPSILON))
            gradient.zero_()
        for node in self.nodes:
            node.hold_range()


def _parts(images: Tensor) -> Sequence[Tensor]:
    return images.split(max(1, _VALUES // images[0].numel()))


PASS = Pass(run, DistillOptions, sets_ranges=True, judges_itself=True)
