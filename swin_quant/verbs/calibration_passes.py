"""Passes behind a calibration: on its own pictures, and recorded in its card."""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import log
from swin_quant.cards.records import PassRecord
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import list_exchanges, list_padded_modules, list_units, norms_without_weights
from swin_quant.quant.calibration import Calibration, Method, calibrate
from swin_quant.quant.fold import list_foldable_norms
from swin_quant.quant.outlier_channels import OutlierChannels, outlier_channels
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import NO_GAIN, outliers
from swin_quant.quant.passes.recipe import PassStep
from swin_quant.quant.passes.run import CORRECTED, EVENED, PassPlan, run_passes
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policy import enabled_nodes

_CHUNK = 8  # pictures at a time, whatever the batches were


def improve(
    model: nn.Module,
    calibration: Calibration,
    images: Sequence[tuple[int, Tensor]],
    method: Method,
    plan: PassPlan,
    scratch: Scratch = Scratch(),
) -> tuple[Calibration, list[PassRecord]]:
    """Run the passes of `plan` on a calibrated model under its policy: the last calibration, and a record a pass.

    `images`: the numbered batches that calibrated it. `scratch`: where long passes keep finished parts.
    """
    steps = plan.steps
    if not steps and not (plan.automatic and _is_known(model) and enabled_nodes(model)):
        return calibration, []
    if not _is_known(model):
        names = ", ".join(step.name for step in steps)
        raise SwinQuantError(
            f"{names}: {type(model).__name__} names no units, which passes go through: sq.wrap finds those of a network"
        )
    everyone = _chunked(images)
    parts = list_units(model), list_exchanges(model), scratch, list_padded_modules(model), norms_without_weights(model)
    context = PassContext(model, everyone, method, *parts)
    if not steps and not (context.units and (steps := _automatic(model, context))):
        return calibration, []
    again: list[Calibration] = []

    def observe_again() -> None:
        again.append(calibrate(model, [batch for _, batch in images], method))

    gains = run_passes(context, steps, observe_again)
    if lost := [gain.step.name for gain in gains if not gain.kept]:
        log.warning("taken back, because the logits came out worse: %s", listed(lost))
    observing = [gain for gain in gains if gain.observed]
    seen = [calibration, *(found for found, gain in zip(again, observing, strict=True) if gain.kept)]
    records = [
        PassRecord(
            name=gain.step.name,
            options={key: value for key, value in gain.step.to_dict().items() if key != "name"},
            note=gain.note,
            seconds=round(gain.seconds, 1),
            kept=gain.kept,
            keeps_function=gain.keeps_function,
            keeps_features=gain.keeps_features,
            sqnr_db=list(gain.sqnr_db),
            agreement=list(gain.agreement),
        )
        for gain in gains
    ]
    return seen[-1], finite(records)


def _automatic(model: nn.Module, context: PassContext) -> tuple[PassStep, ...]:
    """The passes that run where none is asked for."""
    steps: tuple[PassStep, ...] = ()
    if found := outliers(context):
        worst = max(found, key=found.__getitem__)
        told = "channels stand out in %d place%s, in %s by %.0f times: they are evened out; ‹passes› none leaves them"
        log.info(told, len(found), "s" if len(found) > 1 else "", worst, found[worst])
        steps += EVENED
    is_wrapped = getattr(model, "architecture", None) is None  # its float network stays in memory, for deltas
    return steps + CORRECTED if is_wrapped and list_foldable_norms(model) else steps


def outliers_left(
    model: nn.Module, images: Sequence[tuple[int, Tensor]], passes: Sequence[PassRecord]
) -> list[OutlierChannels]:
    """Channels that stand out in the first pictures, and remedies beside these passes."""
    if not _is_known(model) or not enabled_nodes(model):
        return []
    ran = [one for one in passes if one["name"] == "equalize"]
    exchanged = any(one["kept"] and not one["note"].startswith(NO_GAIN) for one in ran)
    context = PassContext(model, _chunked(images), exchanges=list_exchanges(model), changes=False)
    return outlier_channels(context, exchanged, tried=bool(ran))


def _is_known(model: nn.Module) -> bool:
    return isinstance(model, Classifier) and (model.architecture is not None or bool(model.own_units))


def _chunked(images: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """The pictures in the order of their batches' numbers, in batches of _CHUNK."""
    batches = [batch for _, batch in sorted(images, key=itemgetter(0)) if len(batch)]
    return list(torch.cat(batches).split(_CHUNK)) if batches else []
