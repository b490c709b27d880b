"""Write the float weights of any checkpoint that we read, in Microsoft's names, with a run card; ranges stay behind."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import UsageError
from swin_quant.base.files import compute_sha256, ensure_writable_dir, require_file
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again, choose_result_source, refuse_to_replace
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord
from swin_quant.checkpoint import load_float, made_before, save_float
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import ModelFile
from swin_quant.models import build_model
from swin_quant.models.registry import list_exchanges
from swin_quant.quant.passes.places import take_back
from swin_quant.verbs.calibration_passes import passes_in_weights

EXAMPLES = """swin-quant convert timm_swin_tiny.safetensors --to swin_tiny.pth
swin-quant convert my.pth --to half.safetensors --dtype float16
swin-quant convert my.pth --to mindspore.ckpt"""
_MINDSPORE = ".ckpt"
FORMATS = (".pth", ".safetensors", _MINDSPORE)
_NAMED = ("swin", "swinv2")  # by MindSpore, and timm's ResNet
_WITHOUT = ("output_kind", "random_weights", "device")


def convert(
    checkpoint: Annotated[str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",), _WITHOUT)],
    to: Annotated[str | Path, Parameter(name="--to")],
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
) -> Path:
    """Write the float weights of a checkpoint in the format of the target's suffix, with a run card.

    How they were trained, or corrected by passes, and from which original, stays known; ranges and results stay with
    the other file.

    Args:
        checkpoint: A checkpoint of any publisher, calibrated or not.
        to: file to write: .pth or .safetensors, or .ckpt in MindSpore's names
        dtype: type of the weights

    Returns:
        The file.

    Raises:
        SwinQuantError: The checkpoint cannot be read.
        UsageError: The file would replace another, or has no format that is known.
    """
    one_process("convert")
    file = checkpoint if isinstance(checkpoint, ModelFile) else ModelFile(str(checkpoint))
    opened, cfg, target = file.need_checkpoint(), file.config(), Path(to)
    if target.suffix not in FORMATS:
        raise UsageError(f"‹to› {target}: must end in {' or '.join(FORMATS)}")
    resnet = cfg.MODEL.TYPE == "timm" and cfg.MODEL.TIMM.ARCHITECTURE.startswith("resnet")
    if target.suffix == _MINDSPORE and not resnet and cfg.MODEL.TYPE not in _NAMED:
        raise UsageError(f"‹to› {target}: MindSpore's names are known of Swin and ResNet alone: write another format")
    require_file(opened, "checkpoint")
    if target.exists() and target.samefile(opened):
        raise UsageError(f"‹to› {target}: is the checkpoint that is read; give another name")
    if card_path(target) == card_path(Path(opened)) and card_path(target).exists():
        raise UsageError(f"‹to› {target}: {card_path(target)} is the run card of {opened}; give another name")
    refuse_to_replace(target)
    model = build_model(cfg)
    source = load_float(model, opened, replace_head=file.replace_head)
    for exchange in list_exchanges(model):  # other tools know the names of a trained network only
        take_back(model, exchange)
    before = opened.card
    record = choose_result_source(made_before(opened), source.record())
    ensure_writable_dir(target.parent)
    save_float(model, target, getattr(torch, dtype))
    names, preprocess = read_class_names(cfg, opened, file.replace_head), Preprocess.from_config(cfg).to_dict()
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), preprocess, record, class_names=names)
    if before:
        training = calibrated_again(before) if before.is_qat else before.training
        card = replace(card, preprocess=before.preprocess, training=training, calibration=_find_passes(before))
    card = replace(card, checkpoint={"file": target.name, "sha256": compute_sha256(target)})
    card.write(card_path(target))
    log.info("checkpoint: %s", target)
    log.info("run card: %s", card_path(target))
    return target


def _find_passes(card: RunCard) -> CalibrationRecord | None:
    """The calibration, where the weights have seen passes behind it; without the facts on its ranges."""
    passes = passes_in_weights(card)
    if card.calibration is None or not passes:
        return None
    return {**card.calibration, "passes": passes, "check": None, "statistics": None, "advice": []}
