"""Plan the passes after a calibration, run them one after another, and measure the network's logits before and after
each.

A pass that harms the logits is taken back, whatever it measured at units. A pass that judges itself is not: it measured
logits on varied pictures, while the pictures here favour earlier passes, which solved for weights on them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.cards.records import PassRecord
from swin_quant.quant.calibration import Calibration, check_weights
from swin_quant.quant.check import compare, compute_logits
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.recipe import PassRecipe, PassStep, parse_steps
from swin_quant.quant.passes.trial import RANGES, Values, copy_state, give_state
from swin_quant.quant.passes.units import given_by
from swin_quant.quant.policy import enabled_nodes, refuse_blocks
from swin_quant.quant.quantizer import Role
from swin_quant.quant.watch import watching

PICTURES = 64  # to measure on
_HARM_DB = 0.5  # a smaller loss may be chance
_ALIKE = 1e-3  # of the norm: float32 rounds factors of twelve octaves to far less
EVENED = parse_steps([{"name": "equalize", "only_outliers": True}])
CORRECTED = parse_steps([{"name": "bias_correction"}])  # gains 4 to 5 dB on EfficientNet-Lite0 (docs/any_model.md)


def run_passes(
    context: PassContext, steps: Sequence[PassStep], calibration: Calibration, observe_again: Callable[[], Calibration]
) -> tuple[Calibration, list[PassRecord]]:
    """Change `context.model`, which has the ranges of `calibration` under its policy; `observe_again` calibrates anew.

    Returns the last calibration that was kept, and a record a pass. UsageError if there is nothing to work on.
    """
    refuse(context.model, steps)
    names = _names(steps)
    if not context.units:
        raise UsageError(f"{names}: this architecture names no `units`, which passes go through one after the other")
    if not len(context.images) or not len(context.images[0]):
        raise SwinQuantError(f"{names}: there is no picture to measure on: check ‹data_path›")
    check_weights(context.model)
    images, records = context.first(PICTURES), list[PassRecord]()
    expected: Tensor | None = None
    for step in steps:
        kept, start = copy_state(context.model), time.perf_counter()
        note = step.kind.run(context, step.options)
        left = copy_state(context.model)
        record = PassRecord(
            name=step.name,
            options={key: value for key, value in step.to_dict().items() if key != "name"},
            note=note,
            seconds=round(time.perf_counter() - start, 1),
            kept=True,
            keeps_function=True,
            keeps_features=True,
            sqnr_db=[],
            agreement=[],
        )
        records.append(record)
        if _same(left, kept):
            log.info("%s: changed nothing, %.0f s (%s)", step.name, record["seconds"], note)
            continue
        if expected is None:  # the network is still the one that was calibrated, or evened out
            give_state(context.model, kept)
            expected = compute_logits(context.model, images)
            before = compare(context.model, images, expected)
            give_state(context.model, left)
        found = calibration
        weights = ({name: x for name, x in state.items() if not name.endswith(RANGES)} for state in (left, kept))
        record["keeps_function"] = step.kind.keeps_function or _same(*weights)
        if step.kind.observes_again:
            was, now = (_features(context, model) for model in (context.original, context.model))
            alike = (bool((now[name] - x).norm() <= _ALIKE * x.norm()) for name, x in was.items())
            record["keeps_features"] = all(alike)
            found = observe_again()
        after = compare(context.model, images, expected)
        record["kept"] = step.kind.judges_itself or after[1] >= before[1] - _HARM_DB
        record["sqnr_db"], record["agreement"] = [before[1], after[1]], [before[0], after[0]]
        record["seconds"] = round(time.perf_counter() - start, 1)
        log.info(
            "%s: SQNR of the logits %.1f -> %.1f dB, agreement %.1f -> %.1f %%, %.0f s (%s)%s",
            step.name, before[1], after[1], before[0], after[0], record["seconds"], note,
            "" if record["kept"] else ": taken back",
        )  # fmt: skip
        if not record["kept"]:
            give_state(context.model, kept)
            continue
        before, calibration = after, found
        if step.kind.observes_again:
            context, expected = replace(context), None  # later passes measure against the same function in new weights
    return calibration, records


def refuse(model: nn.Module, steps: Sequence[PassStep]) -> None:
    """UsageError if the model's policy quantizes nothing, or forbids one of the steps."""
    if steps and not enabled_nodes(model):
        raise UsageError(f"{_names(steps)}: the policy quantizes nothing: there is nothing to make better")
    if choosing := [step for step in steps if step.kind.sets_ranges]:
        refuse_blocks(model, _names(choosing))


def _names(steps: Sequence[PassStep]) -> str:
    return ", ".join(dict.fromkeys(step.name for step in steps))


@torch.inference_mode()
def _features(context: PassContext, model: nn.Module) -> Values:
    """The outputs of units for a picture, and of `padded` modules as if half of their input were padding, which
    pictures of this size do not have."""
    inputs_by_name: dict[str, tuple[Any, ...]] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        inputs_by_name[name] = inputs

    with watching({name: model.get_submodule(name) for name in context.padded}, look):
        _, found = given_by(context.units, model, context.images[0][:1])
    for name, (x, *others) in inputs_by_name.items():
        x = x.clone()
        x[:, x.shape[1] // 2 :] = 0
        found[name] = model.get_submodule(name)(x, *others).float()
    return found


def _same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@dataclass(frozen=True)
class PassPlan:
    """The passes after a calibration; with `recipe`, they depend on the policy's bits.

    `automatic`: without chosen passes, outlier channels are evened out, and biases after the folded batch norms of a
    wrapped module are corrected.
    """

    steps: tuple[PassStep, ...] = ()
    automatic: bool = False
    recipe: PassRecipe | None = None

    def for_model(self, model: nn.Module) -> "PassPlan":
        """The plan for the bits that half of a model's enabled nodes have at least: a few nodes with other bits do not
        change a recipe. UsageError if its policy forbids a pass."""
        bits: dict[bool, list[int]] = {True: [], False: []}
        for node in enabled_nodes(model).values():
            bits[node.role is Role.GEMM_WEIGHT].append(node.setting.bits)
        weights, activations = (median_high(bits[kind] or [8]) for kind in (True, False))
        steps = self.recipe.for_bits(min(weights, activations), activations) if self.recipe else self.steps
        refuse(model, steps)
        return replace(self, steps=steps, recipe=None)
