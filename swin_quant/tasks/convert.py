"""The float weights of any checkpoint that we read, in Microsoft's names, with a run card; ranges stay behind."""

from dataclasses import replace
from pathlib import Path

import torch
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir, require_file, sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.dependents import refuse_to_replace
from swin_quant.cards.lineage import card_of
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord, CheckpointRecord
from swin_quant.checkpoint import load_float, save_float
from swin_quant.config.portable import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models.registry import exchanges_of
from swin_quant.quant.passes.places import take_back
from swin_quant.tasks.calibrated import calibrated_again, made_before, names_of, original
from swin_quant.tasks.passes import of_weights

MINDSPORE = ".ckpt"
FORMATS = (".pth", ".safetensors", MINDSPORE)
_NAMED = ("swin", "swinv2")  # by MindSpore, and timm's ResNet


def convert(
    cfg: CfgNode, checkpoint: str, target: Path, dtype: torch.dtype = torch.float32, replace_head: bool = False
) -> RunCard:
    """Write the weights of `checkpoint` to `target`, as `dtype`, in the format of its suffix; returns the new card.

    How they were trained, or corrected by passes, and from which original, stays known; what was measured was measured
    of the other file.
    """
    if target.suffix not in FORMATS:
        raise UsageError(f"‹to› {target}: must end in {' or '.join(FORMATS)}")
    resnet = cfg.MODEL.TYPE == "timm" and cfg.MODEL.TIMM.ARCHITECTURE.startswith("resnet")
    if target.suffix == MINDSPORE and not resnet and cfg.MODEL.TYPE not in _NAMED:
        raise UsageError(f"‹to› {target}: MindSpore's names are known of Swin and ResNet alone: write another format")
    require_file(checkpoint, "checkpoint")
    if target.exists() and target.samefile(checkpoint):
        raise UsageError(f"‹to› {target}: is the checkpoint that is read; give another name")
    if card_path(target) == card_path(Path(checkpoint)) and card_path(target).exists():
        raise UsageError(f"‹to› {target}: {card_path(target)} is the run card of {checkpoint}; give another name")
    refuse_to_replace(target)
    model = build_model(cfg)
    source = load_float(model, checkpoint, replace_head=replace_head)
    for exchange in exchanges_of(model):  # others know the names of a trained network only
        take_back(model, exchange)
    before = card_of(checkpoint)
    record = original(made_before(checkpoint, source.calibrated), source)
    ensure_writable_dir(target.parent)
    save_float(model, target, dtype)
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict(), record,
                   class_names=names_of(cfg, source.path, replace_head))  # fmt: skip
    if before:
        training = calibrated_again(before) if before.is_qat else before.training
        card = replace(card, preprocess=before.preprocess, training=training, calibration=_passes_of(before))
    card = replace(card, checkpoint=CheckpointRecord(file=target.name, sha256=sha256_of(target)))
    card.write(card_path(target))
    return card


def _passes_of(card: RunCard) -> CalibrationRecord | None:
    """The calibration, where the weights have seen passes behind it; without what is said of its ranges."""
    passes = of_weights(card)
    if card.calibration is None or not passes:
        return None
    return {**card.calibration, "passes": passes, "check": None, "statistics": None, "advice": []}
