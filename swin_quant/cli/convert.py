"""swin-quant convert."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.base.files import ensure_writable_dir, require_file, sha256_of
from swin_quant.cli import deployed, options

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = (
    "Write the float weights of any checkpoint that we read, in Microsoft's names, with a run card; ranges stay behind."
)
EXAMPLES = """examples:
  swin-quant convert timm_swin_tiny.safetensors --to swin_tiny.pth
  swin-quant convert my.pth --to my.safetensors --dtype float16       (half the size)"""
TYPES = ("float32", "float16", "bfloat16")
FORMATS = (".pth", ".safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "checkpoint: Microsoft's, timm's, Hugging Face's, calibrated or not")
    parser.add_argument("--to", required=True, metavar="FILE", help=f"what to write: {' or '.join(FORMATS)}")
    parser.add_argument("--dtype", default="float32", choices=TYPES, help="of the weights (default float32)")


def run(args: argparse.Namespace, world: World) -> None:
    import torch

    from swin_quant.base.progress import log
    from swin_quant.cards.card import RunCard
    from swin_quant.cards.lineage import card_of
    from swin_quant.cards.paths import card_path
    from swin_quant.checkpoint import load_float, save_float
    from swin_quant.config.portable import portable_config
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.models import build_model
    from swin_quant.tasks.calibrate import calibrated_again

    deployed.refuse_ranks(world, "convert")
    if not args.checkpoint:
        raise UsageError("no checkpoint: name the one to read")
    target = Path(args.to)
    if target.suffix not in FORMATS:
        raise UsageError(f"--to {target}: must end in {' or '.join(FORMATS)}")
    require_file(args.checkpoint, "checkpoint")
    if target.exists() and target.samefile(args.checkpoint):
        raise UsageError(f"--to {target}: is the checkpoint that is read; give another name")
    cfg = options.config_of(args)
    model = build_model(cfg)
    source = load_float(model, args.checkpoint, replace_head=args.replace_head)
    before = card_of(args.checkpoint)
    record = before.source if before and before.is_qat else source.record()
    ensure_writable_dir(target.parent)
    save_float(model, target, getattr(torch, args.dtype))
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict(), record)
    if before:  # how it was trained stays known; what was measured was measured of the other file
        training = calibrated_again(before) if before.is_qat else before.training
        card = replace(card, preprocess=before.preprocess, training=training)
    replace(card, checkpoint={"file": target.name, "sha256": sha256_of(target)}).write(card_path(target))
    log.info("checkpoint: %s", target)
    log.info("run card: %s", card_path(target))
