"""Write the float weights of any checkpoint that we read, in Microsoft's names, with a run card; ranges stay behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir, require_file, sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import calibrated_again, refuse_to_replace, source_of_result
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord
from swin_quant.cli.flags import Flag
from swin_quant.cli.shared import ModelOptions, ReplaceHead, config_of, one_process, opened
from swin_quant.config.load import portable_config

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EXAMPLES = """examples:
  swin-quant convert timm_swin_tiny.safetensors --to swin_tiny.pth
  swin-quant convert my.pth --to half.safetensors --dtype float16       (half the size)
  swin-quant convert my.pth --to mindspore.ckpt                         (in mindcv's names)"""
_MINDSPORE = ".ckpt"
FORMATS = (".pth", ".safetensors", _MINDSPORE)
_NAMED = ("swin", "swinv2")  # by MindSpore, and timm's ResNet


@dataclass(frozen=True)
class ConvertOptions:
    """Which checkpoint is read, and what is written."""

    to: Annotated[Path, Flag(f"file to write: {' or '.join(FORMATS)}", "FILE")]
    checkpoint: Annotated[
        str | None,
        Flag("checkpoint: Microsoft's, timm's, Hugging Face's, calibrated or not", "CHECKPOINT", or_flag=True),
    ] = None
    model: ModelOptions = ModelOptions()
    replace_head: ReplaceHead = False
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], Flag("type of the weights")] = "float32"


def run(options: ConvertOptions, world: World) -> None:
    """Write the weights in the format of the target's suffix.

    How they were trained, or corrected by passes, and from which original, stays known; results stay with the
    other file.
    """
    import torch

    from swin_quant.checkpoint import load_float, made_before, save_float
    from swin_quant.checkpoint.class_names import names_of
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.models import build_model
    from swin_quant.models.registry import exchanges_of
    from swin_quant.quant.passes.places import take_back

    one_process(world, "convert")
    if not (checkpoint := opened(options.checkpoint)):
        raise UsageError("no checkpoint: name the one to read")
    cfg, target = config_of(checkpoint, options.model), options.to
    if target.suffix not in FORMATS:
        raise UsageError(f"‹to› {target}: must end in {' or '.join(FORMATS)}")
    resnet = cfg.MODEL.TYPE == "timm" and cfg.MODEL.TIMM.ARCHITECTURE.startswith("resnet")
    if target.suffix == _MINDSPORE and not resnet and cfg.MODEL.TYPE not in _NAMED:
        raise UsageError(f"‹to› {target}: MindSpore's names are known of Swin and ResNet alone: write another format")
    require_file(checkpoint, "checkpoint")
    if target.exists() and target.samefile(checkpoint):
        raise UsageError(f"‹to› {target}: is the checkpoint that is read; give another name")
    if card_path(target) == card_path(Path(checkpoint)) and card_path(target).exists():
        raise UsageError(f"‹to› {target}: {card_path(target)} is the run card of {checkpoint}; give another name")
    refuse_to_replace(target)
    model = build_model(cfg)
    source = load_float(model, checkpoint, replace_head=options.replace_head)
    for exchange in exchanges_of(model):  # other tools know the names of a trained network only
        take_back(model, exchange)
    before = checkpoint.card
    record = source_of_result(made_before(checkpoint), source.record())
    ensure_writable_dir(target.parent)
    save_float(model, target, getattr(torch, options.dtype))
    names, preprocess = names_of(cfg, checkpoint, options.replace_head), Preprocess.from_config(cfg).to_dict()
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), preprocess, record, class_names=names)
    if before:
        training = calibrated_again(before) if before.is_qat else before.training
        card = replace(card, preprocess=before.preprocess, training=training, calibration=_passes_of(before))
    card = replace(card, checkpoint={"file": target.name, "sha256": sha256_of(target)})
    card.write(card_path(target))
    log.info("checkpoint: %s", target)
    log.info("run card: %s", card_path(target))


def _passes_of(card: RunCard) -> CalibrationRecord | None:
    """The calibration, where the weights have seen passes behind it; without the facts on its ranges."""
    from swin_quant.verbs.calibration_passes import of_weights

    passes = of_weights(card)
    if card.calibration is None or not passes:
        return None
    return {**card.calibration, "passes": passes, "check": None, "statistics": None, "advice": []}
