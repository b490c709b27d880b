"""Run passes one after another, and measure the network's logits before and after each.

A pass that harms the logits is taken back, whatever it measured at units. A pass that judges itself is not: it measured
logits on varied pictures, while the pictures here favour earlier passes, which solved for weights on them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.distributed import from_main
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.quant.calibration import check_weights
from swin_quant.quant.check import compare, logits_of
from swin_quant.quant.passes.kind import PassContext
from swin_quant.quant.passes.recipe import PassStep
from swin_quant.quant.passes.state import Values, give_state, state_of, weights_in
from swin_quant.quant.passes.units import given_by
from swin_quant.quant.policy import enabled_nodes, refuse_blocks
from swin_quant.quant.watch import watching

PICTURES = 64  # to measure on
_HARM_DB = 0.5  # a smaller loss may be chance
_ALIKE = 1e-3  # of the norm: float32 rounds factors of twelve octaves to far less


@dataclass(frozen=True)
class Gain:
    """The result of a pass: SQNR of the logits in dB and top-1 agreement in percent, against float, before and after.

    `kept`: it was not taken back. `observed`: ranges were observed again after it. `keeps_function`: float's logits
    stay; `keeps_features`: so do the float outputs of units, and of padded maps.
    """

    step: PassStep
    note: str
    seconds: float
    sqnr_db: tuple[float, float]
    agreement: tuple[float, float]
    kept: bool
    observed: bool = False
    keeps_function: bool = True
    keeps_features: bool = True


def run_passes(context: PassContext, steps: Sequence[PassStep], observe_again: Callable[[], None]) -> list[Gain]:
    """Change `context.model`, which is calibrated under its policy; `observe_again` observes its ranges again.

    UsageError if there is nothing to work on. All ranks get rank 0's result.
    """
    _check(context, steps)
    images = context.first(PICTURES)
    expected = logits_of(context.model, images)
    before, gains = compare(context.model, images, expected), []
    for step in steps:
        kept, start = state_of(context.model), time.perf_counter()
        note = step.kind.run(context, step.options)
        _agree(context.model)
        left = state_of(context.model)
        renewed = step.kind.observes_again and not _same(left, kept)
        keeps = step.kind.keeps_function or _same(weights_in(left), weights_in(kept))
        alike = not renewed or _features_alike(context)
        if renewed:
            observe_again()
        after = compare(context.model, images, expected)
        harmless = from_main(step.kind.judges_itself or after[1] >= before[1] - _HARM_DB)
        if not harmless:
            give_state(context.model, kept)
        elif renewed:
            context = replace(context)  # later passes measure against the same function in the new weights
        seconds = time.perf_counter() - start
        gains.append(
            Gain(step, note, seconds, (before[1], after[1]), (before[0], after[0]), harmless, renewed, keeps, alike)
        )
        _say(gains[-1])
        before = after if harmless else before
    return gains


def refuse(model: nn.Module, steps: Sequence[PassStep]) -> None:
    """UsageError if the model's policy quantizes nothing, or forbids one of the steps."""
    if steps and not enabled_nodes(model):
        raise UsageError(f"{_names(steps)}: the policy quantizes nothing: there is nothing to make better")
    if of_ranges := [step for step in steps if step.kind.of_ranges]:
        refuse_blocks(model, _names(of_ranges))


def _names(steps: Sequence[PassStep]) -> str:
    return ", ".join(dict.fromkeys(step.name for step in steps))


def _check(context: PassContext, steps: Sequence[PassStep]) -> None:
    refuse(context.model, steps)
    names = _names(steps)
    if not context.units:
        raise UsageError(f"{names}: this architecture names no `units`, which passes go through one after the other")
    if not len(context.images) or not len(context.images[0]):
        raise SwinQuantError(f"{names}: there is no picture to measure on: check ‹data_path› and ‹pictures›")
    check_weights(context.model)


def _say(gain: Gain) -> None:
    (agreed, agrees), (was, now) = gain.agreement, gain.sqnr_db
    log.info(
        "%s: SQNR of the logits %.1f -> %.1f dB, agreement %.1f -> %.1f %%, %.0f s (%s)%s",
        gain.step.name, was, now, agreed, agrees, gain.seconds, gain.note, "" if gain.kept else ": taken back",
    )  # fmt: skip


def _features_alike(context: PassContext) -> bool:
    was, now = (_features(context, model) for model in (context.original, context.model))
    return all(bool((now[name] - x).norm() <= _ALIKE * x.norm()) for name, x in was.items())


@torch.inference_mode()
def _features(context: PassContext, model: nn.Module) -> Values:
    """The outputs of units for a picture, and of `padded` modules as if half of their input were padding, which
    pictures of this size do not have."""
    inputs_of: dict[str, tuple[Any, ...]] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        inputs_of[name] = inputs

    with watching({name: model.get_submodule(name) for name in context.padded}, look):
        _, found = given_by(context.units, model, context.images[0][:1])
    for name, (x, *others) in inputs_of.items():
        x = x.clone()
        x[:, x.shape[1] // 2 :] = 0
        found[name] = model.get_submodule(name)(x, *others).float()
    return found


def _same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _agree(model: nn.Module) -> None:
    device = next(model.parameters()).device
    give_state(model, {name: value.to(device) for name, value in from_main(state_of(model)).items()})
