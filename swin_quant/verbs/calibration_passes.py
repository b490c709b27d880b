"""Passes and advice behind a calibration: on its own pictures, and recorded in its card."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError, as_flags, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import AdviceRecord, CalibrationRecord, CheckRecord, CoverageRecord, PassRecord
from swin_quant.model import passes_in_weights
from swin_quant.models.classifier import Classifier
from swin_quant.models.placement import coverage
from swin_quant.models.registry import list_exchanges, list_padded_modules, list_units
from swin_quant.quant.advice import Findings, advise, format_figures
from swin_quant.quant.calibration import Calibration, Method, calibrate
from swin_quant.quant.check import RUIN_DB, check_ranges
from swin_quant.quant.fold import list_foldable_norms
from swin_quant.quant.passes import PassContext
from swin_quant.quant.passes.equalize import NO_GAIN, OutlierChannels, outlier_channels
from swin_quant.quant.passes.run import CORRECTED, EVENED, PassPlan, run_passes
from swin_quant.quant.policy import Policy, enabled_nodes
from swin_quant.quant.quantizer import Quantizer, named_nodes
from swin_quant.quant.watch import eval_mode
from swin_quant.verbs.calibration import Observed, search_record

_CHUNK = 8  # pictures at a time, whatever the batches were
_SHOWN = 5  # lines of advice on the screen, beside warnings


def improve(
    context: PassContext, calibration: Calibration, images: Sequence[tuple[int, Tensor]], plan: PassPlan
) -> tuple[Calibration, list[PassRecord]]:
    """Run the passes of `plan` on a calibrated model under its policy: the last calibration, and a record a pass.

    `images`: the numbered batches that calibrated it.
    """
    steps, model, method = plan.steps, context.model, context.method
    if not steps and not (plan.automatic and _is_known(model) and enabled_nodes(model)):
        return calibration, []
    if not _is_known(model):
        names = ", ".join(step.name for step in steps)
        raise SwinQuantError(
            f"{names}: {type(model).__name__} names no units, which passes go through: sq.wrap finds those of a network"
        )
    if not steps and context.units:  # the passes that run where none is asked for
        if found := outlier_channels(context):
            worst = max(found, key=lambda one: one.times)
            told = "outlier channels in %d place%s (%s: %.0f times the median): equalize runs; ‹passes› none skips it"
            log.info(told, len(found), "s" if len(found) > 1 else "", worst.place, worst.times)
            steps += EVENED
        is_wrapped = getattr(model, "architecture", None) is None  # its float network stays in memory, for deltas
        steps += CORRECTED if is_wrapped and list_foldable_norms(model) else ()
    if not steps:
        return calibration, []

    def observe_again() -> Calibration:
        return calibrate(model, [batch for _, batch in images], method)

    calibration, records = run_passes(context, steps, calibration, observe_again)
    if lost := [one["name"] for one in records if not one["kept"]]:
        log.warning("taken back, because the logits came out worse: %s", listed(lost))
    return calibration, finite(records)


def outliers_left(context: PassContext, passes: Sequence[PassRecord]) -> list[OutlierChannels]:
    """Outlier channels in the first pictures that these passes left; of those tried in vain, only beside enabled
    nodes."""
    enabled = enabled_nodes(context.model)
    ran = [one for one in passes if one["name"] == "equalize"]
    exchanged = any(one["kept"] and not one["note"].startswith(NO_GAIN) for one in ran)
    if not _is_known(context.model) or not enabled or exchanged:
        return []
    on = {name for node in enabled for name in (node, node.rpartition(".")[0])}
    return [one for one in outlier_channels(context) if not ran or on & {one.place, *one.cure}]


def _is_known(model: nn.Module) -> bool:
    return isinstance(model, Classifier) and (model.architecture is not None or bool(model.own_units))


def make_context(model: nn.Module, images: Sequence[tuple[int, Tensor]], method: Method) -> PassContext:
    """The context of passes on a model: the pictures of numbered batches in their order, in batches of _CHUNK."""
    batches = [batch for _, batch in sorted(images, key=itemgetter(0)) if len(batch)]
    pictures = list(torch.cat(batches).split(_CHUNK)) if batches else []
    if not _is_known(model):
        return PassContext(model, pictures, method, changes=False)
    return PassContext(model, pictures, method, list_units(model), list_exchanges(model), list_padded_modules(model))


def improved(
    model: nn.Module, found: Observed, plan: PassPlan, before: RunCard | None, policy: Policy
) -> tuple[Calibration, CalibrationRecord]:
    """Run the passes of `plan` behind an observation, then check the ranges under `policy`, which is applied.

    Returns the last calibration, and its record with the passes that the weights have seen, those of `before` too, the
    cost of the ranges, and advice, which is also said: warnings first, and then a handful of hints.
    """
    calibration, record, method = found.calibration, found.record, found.method
    passes, channels = passes_in_weights(before), list[OutlierChannels]()
    if len({batch.shape[1:] for _, batch in found.images if len(batch)}) > 1:  # an empty batch may be of any size
        if plan.steps:
            raise UsageError(
                "‹passes›: needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE square"
            )
        record = {**record, "passes": passes} if passes else record
    else:
        with eval_mode(model):
            context = make_context(model, found.images, method)
            calibration, done = improve(context, calibration, found.images, plan)
            if passes := [*passes, *done]:
                again = search_record(method, model, calibration)
                record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
            channels = outliers_left(context, passes)
    check = check_ranges(model, calibration, method, found.some)
    ran = record.get("passes", [])
    kept, taken_back = ([one["name"] for one in ran if one["kept"] is is_kept] for is_kept in (True, False))
    advice = advise(Findings(named_nodes(model), calibration, method, policy.name, check, kept, taken_back, channels))
    hints = [one for one in advice if not one.warns]
    for one in advice:
        if one.warns:
            log.warning(one.text)
    for one in hints[:_SHOWN]:
        log.info("advice: %s", one.text)
    if len(hints) > _SHOWN:
        log.info("advice: %d more in the run card", len(hints) - _SHOWN)
    told = [AdviceRecord(kind=one.kind, text=as_flags(one.text), nodes=list(one.nodes)) for one in advice]
    record = {**record, "advice": told}
    if products := getattr(model, "products", ()):
        every = model.named_modules(remove_duplicate=False)  # a shared layer is called by any of its names
        covered = coverage(products, [key for key, one in every if isinstance(one, Quantizer) and one.setting.enabled])
        record["coverage"] = cast(CoverageRecord, asdict(covered))
        log.info("%s: %s", policy.name, covered)
    if check is not None:
        if not check.better and check.sqnr_db >= RUIN_DB:
            log.info("%s: %s", policy.name, format_figures(check))
        record["check"] = CheckRecord(
            policy=policy.name,
            pictures=check.pictures,
            agreement=check.agreement,
            sqnr_db=finite(check.sqnr_db),
            others=finite(check.others),
            at_fault=list(check.at_fault),
        )
    return calibration, record
