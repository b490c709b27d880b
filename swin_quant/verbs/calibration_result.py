"""A calibration in memory: its ranges, with record and advice, before and behind passes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

from torch import Tensor, nn

from swin_quant.base.errors import UsageError, as_flags
from swin_quant.base.files import finite
from swin_quant.base.progress import clock, log, span
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import AdviceRecord, CalibrationRecord, CheckRecord, CoverageRecord, SearchRecord
from swin_quant.checkpoint.ranges import bits_record
from swin_quant.data.loader import Numbered
from swin_quant.model import passes_in_weights
from swin_quant.models.placement import coverage
from swin_quant.quant.advice import Findings, advise, format_figures
from swin_quant.quant.calibration import Calibration, Method, observing, set_ranges
from swin_quant.quant.check import PICTURES, RUIN_DB, Shown, check_ranges
from swin_quant.quant.outlier_channels import OutlierChannels
from swin_quant.quant.passes.run import PassPlan
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.policy import Policy
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.watch import eval_mode
from swin_quant.verbs.calibration_passes import improve, outliers_left
from swin_quant.verbs.calibration_pictures import CalibrationBatches

_CHECKED = 100  # forward passes of pictures behind the observation: outlier channels, and the check of ranges
_SHOWN = 5  # lines of advice on the screen, beside warnings


def calibrated_on(model: nn.Module, shown: CalibrationBatches, method: Method) -> "CalibrationResult":
    """Calibrate `model`: show it each batch, then search the ranges."""
    device = next(model.parameters()).device
    seen: list[Numbered] = []
    some: list[Shown] = []
    start = clock()
    with observing(model, method) as observation:
        for number, batch in shown.batches:
            images = batch.images.to(device)
            logits = observation.show(images)
            seen.append((number, replace(batch, images=images)))
            if len(seen) == 2 and shown.count:  # the first one tries how batches can run
                seconds = (shown.count + _CHECKED / shown.size) * (clock() - start) / 2
                log.info("calibration takes about %s, without passes that are asked for", span(seconds))
            if (wanted := PICTURES - number * shown.size) > 0:
                some.append((images[:wanted], logits[:wanted]))
    calibration = observation.calibration()
    set_ranges(model, calibration, method)
    record: CalibrationRecord = {
        **shown.record(seen),
        "exact": method.exact,
        "pictures": calibration.pictures,
        "beyond_half": calibration.beyond_half,
        "check": None,
        "statistics": None,
        "advice": [],
        **search_record(method, model, calibration),
    }
    return CalibrationResult(calibration, record, method, some, [(number, batch.images) for number, batch in seen])


def search_record(method: Method, model: nn.Module, calibration: Calibration) -> SearchRecord:
    """How ranges were found in the observed values of the activation nodes that are on, or of all where none is."""
    nodes = [node for node in named_nodes(model).values() if node.role is not Role.GEMM_WEIGHT]
    on = [node for node in nodes if node.setting.enabled] or nodes
    methods = sorted({method.for_bits(node.setting.bits) for node in on})
    return {
        "method": "+".join(methods),
        "percentile": method.percentile if "percentile" in methods else None,
        "dead_nodes": calibration.dead,
        **bits_record(model, method),
    }


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration and its record; its numbered batches, and the first pictures, for the check.

    `outlier_channels`: the channels that still stand out behind the passes.
    """

    calibration: Calibration
    record: CalibrationRecord
    method: Method
    some: Sequence[Shown]
    images: Sequence[tuple[int, Tensor]] = ()
    outlier_channels: Sequence[OutlierChannels] = ()

    def improved(
        self, model: nn.Module, plan: PassPlan, before: RunCard | None = None, scratch: Scratch = Scratch()
    ) -> "CalibrationResult":
        """The result behind the passes of `plan`, recorded with the passes that the weights have seen `before`."""
        earlier = passes_in_weights(before)
        if len({batch.shape[1:] for _, batch in self.images if len(batch)}) > 1:  # an empty batch may be of any size
            if plan.steps:
                raise UsageError(
                    "‹passes›: needs pictures of one size, and these are of several: leave it out, or set TEST.SHAPE "
                    "square"
                )
            return replace(self, record={**self.record, "passes": earlier}) if earlier else self
        record = self.record
        with eval_mode(model):
            calibration, done = improve(model, self.calibration, self.images, self.method, plan, scratch)
            if passes := [*earlier, *done]:
                again = search_record(self.method, model, calibration)
                record = {**record, **again, "beyond_half": calibration.beyond_half, "passes": passes}
            outlier_channels = outliers_left(model, self.images, passes)
        return replace(self, calibration=calibration, record=record, outlier_channels=outlier_channels)

    def checked(self, model: nn.Module, policy: Policy) -> CalibrationRecord:
        """The record, with the cost of the ranges under `policy`, which is applied, and advice, which is also said:
        warnings first, and then a handful of hints."""
        check = check_ranges(model, self.calibration, self.method, self.some)
        ran = self.record.get("passes", [])
        kept, taken_back = ([one["name"] for one in ran if one["kept"] is is_kept] for is_kept in (True, False))
        nodes, channels = named_nodes(model), self.outlier_channels
        advice = advise(Findings(nodes, self.calibration, self.method, policy.name, check, kept, taken_back, channels))
        hints = [one for one in advice if not one.warns]
        for one in advice:
            if one.warns:
                log.warning(one.text)
        for one in hints[:_SHOWN]:
            log.info("advice: %s", one.text)
        if len(hints) > _SHOWN:
            log.info("advice: %d more in the run card", len(hints) - _SHOWN)
        told = [AdviceRecord(kind=one.kind, text=as_flags(one.text), nodes=list(one.nodes)) for one in advice]
        record: CalibrationRecord = {**self.record, "advice": told}
        if products := getattr(model, "products", ()):
            every = model.named_modules(remove_duplicate=False)  # a shared layer is called by any of its names
            covered = coverage(
                products, [name for name, one in every if isinstance(one, Quantizer) and one.setting.enabled]
            )
            record["coverage"] = cast(CoverageRecord, asdict(covered))
            log.info("%s: %s", policy.name, covered)
        if check is None:
            return record
        if not check.better and check.sqnr_db >= RUIN_DB:
            log.info("%s: %s", policy.name, format_figures(check))
        cost = CheckRecord(
            policy=policy.name,
            pictures=check.pictures,
            agreement=check.agreement,
            sqnr_db=finite(check.sqnr_db),
            others=finite(check.others),
            at_fault=list(check.at_fault),
        )
        return {**record, "check": cost}
