"""Ranges by another method, or for other bits, in the statistics that a calibration left: no picture is read again."""

from pathlib import Path

from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.records import CalibrationRecord, CheckpointRecord
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.opened import Checkpoint, open_checkpoint
from swin_quant.loading import refuse_changed_features
from swin_quant.model import Model
from swin_quant.models import build_model
from swin_quant.quant.advice import OF_PICTURES, Advice, Findings, advise
from swin_quant.quant.calibration import Method, set_ranges
from swin_quant.quant.passes import choosing_ranges
from swin_quant.quant.policy import Policy, apply_policy, enabled_nodes
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.statistics_file import SUFFIX, read_calibration
from swin_quant.verbs.calibration_result import search_record, tell_advice


def recalibrate(
    cfg: CfgNode,
    statistics: str | Path,
    checkpoint: Checkpoint | None,
    policy: Policy,
    method: Method,
    output: str | Path,
    world: World = World(),
) -> Model:
    """The same model as `calibrate_checkpoint` gives on the same pictures, to the bit.

    `checkpoint` None is the calibrated one beside the statistics, which has the weights. SwinQuantError if the run card
    beside the statistics is not theirs, or `checkpoint` is not what they were counted on.
    """
    if method.is_auto:
        raise UsageError(
            "‹calibrator› auto: looks at pictures, and statistics hold none: calibrate on them, or name one"
        )
    if world.is_main:
        ensure_writable_dir(output)
    before, searched, calibrated = _card_of(Path(statistics))
    checkpoint = open_checkpoint(checkpoint or calibrated_beside(statistics))
    if settled := choosing_ranges(searched.get("passes", [])):
        raise UsageError(f"{checkpoint}: ranges were chosen by {settled[-1]}: calibrate again, with pictures")
    changed = any(one["kept"] for one in searched.get("passes", []))  # then the source has other weights
    counted_on = (calibrated,) if changed else (before.source, calibrated)
    if checkpoint.sha256 not in [record["sha256"] for record in counted_on if record]:
        raise SwinQuantError(
            f"{checkpoint}: is not what {statistics} was counted on: leave the checkpoint out, or name that"
        )
    refuse_changed_features(str(checkpoint), before, cfg)
    model = build_model(cfg)
    load_float(model, checkpoint)
    apply_policy(model, policy)
    model.to(world.device)

    names = [name for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT]
    calibration = read_calibration(statistics, names, searched["pictures"])
    if not calibration.ends and (
        unsigned := [name for name, node in enabled_nodes(model).items() if not node.setting.symmetric]
    ):
        raise UsageError(
            f"{statistics}: was written before signs were kept, and policy {policy.name} has zero points at "
            f"{listed(unsigned, 2)}: calibrate again, or give a symmetric ‹policy›"
        )
    set_ranges(model, calibration, method)
    passes = [one["name"] for one in searched.get("passes", []) if one["kept"]]
    found = Findings(named_nodes(model), calibration, method, policy.name, passes=passes)
    shown = [one for one in searched.get("advice", []) if one["kind"] in OF_PICTURES]
    still = [Advice(one["kind"], one["text"], tuple(one["nodes"])) for one in shown]
    advice = tell_advice([*advise(found), *still], world)
    gather([])  # before rank 0 may replace what the others still read
    searched.pop("node_methods", None)
    searched.pop("tried_percentile", None)
    searched = {**searched, **search_record(method, model, calibration), "advice": advice}
    searched.pop("check", None)  # the earlier ranges'
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
    done = Model(model, card=card)
    done.calibration = calibration
    done.save_in(Path(output), world)
    return done


def calibrated_beside(statistics: str | Path) -> Path:
    """The calibrated checkpoint that a statistics file belongs to."""
    return Path(statistics).with_name(_card_of(Path(statistics))[2]["file"])


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
