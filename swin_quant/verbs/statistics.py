"""Ranges searched again in the statistics of an earlier calibration: no pictures are needed."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from swin_quant.base.distributed import this_world
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import AdviceRecord, CalibrationRecord, CheckpointRecord, SourceRecord
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.opened import OpenedCheckpoint
from swin_quant.loading import ModelFile, refuse_changed_features
from swin_quant.model import Model
from swin_quant.models import build_model
from swin_quant.quant.advice import OF_PICTURES, Advice, Findings, advise
from swin_quant.quant.calibration import Calibration, Method, set_ranges
from swin_quant.quant.passes import choosing_ranges
from swin_quant.quant.policy import Policy, apply_policy, enabled_nodes, policy_from_dict
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.statistics_file import SUFFIX, read_calibration
from swin_quant.verbs.calibration_result import passes_of, search_record, tell_advice


def search_again(file: ModelFile, statistics: str | Path, policy: Policy | None, method: Method) -> Model:
    """The model that `calibrate` gives on the pictures of the statistics, to the bit.

    Args:
        file: The checkpoint; without one, the calibrated one beside the statistics, which has the weights.
        statistics: What a calibration left: `<NAME>_calib.stats.npz`.
        policy: None: that of the run card beside the statistics.
        method: How ranges are found.

    Raises:
        SwinQuantError: The run card belongs to other statistics, or they were counted on another checkpoint.
    """
    if method.is_auto:
        raise UsageError(
            "‹calibrator› auto: looks at pictures, and statistics hold none: calibrate on them, or name one"
        )
    path = Path(statistics)
    before, searched, calibrated = _card_of(path)
    if not file.checkpoint:
        file = replace(file, checkpoint=str(path.with_name(calibrated["file"])))
    checkpoint, cfg = file.need_checkpoint(), file.config()
    _check_counted_on(checkpoint, statistics, before.source, searched, calibrated)
    refuse_changed_features(str(checkpoint), before, cfg)
    module = build_model(cfg)
    load_float(module, checkpoint)
    policy = policy or policy_from_dict(before.policy, before.name)
    apply_policy(module, policy)
    module.to(this_world().device)

    names = [name for name, node in named_nodes(module).items() if node.role is not Role.GEMM_WEIGHT]
    calibration = read_calibration(statistics, names, searched["pictures"])
    if not calibration.ends and (
        unsigned := [name for name, node in enabled_nodes(module).items() if not node.setting.symmetric]
    ):
        raise UsageError(
            f"{statistics}: was written before signs were kept, and policy {policy.name} has zero points at "
            f"{listed(unsigned, 2)}: calibrate again, or give a symmetric ‹policy›"
        )
    set_ranges(module, calibration, method)
    advice = _advice_again(module, calibration, method, policy, searched)
    for key in ("node_methods", "tried_percentile", "check"):  # figures of the earlier ranges
        searched.pop(key, None)  # type: ignore[misc]
    searched = {**searched, **search_record(method, module, calibration), "advice": advice}
    card = RunCard(
        name=cfg.MODEL.NAME,
        config=before.config,
        preprocess=before.preprocess,
        source=before.source,
        policy=policy.to_dict(),
        training=calibrated_again(before),
        calibration=searched,
        class_names=before.class_names,
    )
    model = Model(module, card=card)
    model.calibration = calibration
    return model


def _check_counted_on(
    checkpoint: OpenedCheckpoint,
    statistics: str | Path,
    source: SourceRecord | None,
    searched: CalibrationRecord,
    calibrated: CheckpointRecord,
) -> None:
    """UsageError if a pass chose the ranges, SwinQuantError for statistics of another checkpoint."""
    if settled := choosing_ranges(searched.get("passes", [])):
        raise UsageError(f"{checkpoint}: ranges were chosen by {settled[-1]}: calibrate again, with pictures")
    changed = any(one["kept"] for one in searched.get("passes", []))  # then the source has other weights
    counted_on = (calibrated,) if changed else (source, calibrated)
    if checkpoint.sha256 not in [record["sha256"] for record in counted_on if record]:
        raise SwinQuantError(
            f"{checkpoint}: is not the checkpoint of {statistics}: leave it out, or name the right one"
        )


def _advice_again(
    model: nn.Module,
    calibration: Calibration,
    method: Method,
    policy: Policy,
    searched: CalibrationRecord,
) -> list[AdviceRecord]:
    """Advice on the new ranges, and the earlier advice that pictures gave."""
    kept, taken_back = passes_of(searched)
    found = Findings(named_nodes(model), calibration, method, policy.name, passes=kept, taken_back=taken_back)
    shown = [one for one in searched.get("advice", []) if one["kind"] in OF_PICTURES]
    still = [Advice(one["kind"], one["text"], tuple(one["nodes"])) for one in shown]
    return tell_advice([*advise(found), *still])


def _card_of(statistics: Path) -> tuple[RunCard, CalibrationRecord, CheckpointRecord]:
    """The run card of a statistics file, its calibration and its checkpoint. SwinQuantError where the hash differs."""
    if not statistics.is_file():
        raise SwinQuantError(f"{statistics}: no such statistics file (*{SUFFIX})")
    path = statistics.with_name(statistics.name.removesuffix(SUFFIX) + ".json")
    if not path.is_file():
        raise SwinQuantError(f"{statistics}: has no run card {path.name} beside it: calibrate again")
    card = RunCard.read(path)
    record = card.calibration.get("statistics") if card.calibration else None
    if record is None or card.calibration is None or card.checkpoint is None:
        raise SwinQuantError(f"{path}: records no statistics (calibrator max keeps none): calibrate again")
    if sha256_of(statistics) != record["sha256"]:
        raise SwinQuantError(f"{statistics}: is not the statistics file of its run card {path.name}: one was replaced")
    return card, card.calibration, card.checkpoint
