"""swin-quant convert."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.base.files import require_file
from swin_quant.cli import deployed, options

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = (
    "Write the float weights of any checkpoint that we read, in Microsoft's names, with a run card; ranges stay behind."
)
EXAMPLES = """examples:
  swin-quant convert timm_swin_tiny.safetensors --to swin_tiny.pth
  swin-quant convert my.pth --to half.safetensors --dtype float16       (half the size)
  swin-quant convert my.pth --to mindspore.ckpt                         (in mindcv's names)"""
TYPES = ("float32", "float16", "bfloat16")
FORMATS = (".pth", ".safetensors", ".ckpt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser, "checkpoint: Microsoft's, timm's, Hugging Face's, calibrated or not")
    parser.add_argument("--to", required=True, metavar="FILE", help=f"what to write: {' or '.join(FORMATS)}")
    parser.add_argument("--dtype", default="float32", choices=TYPES, help="of the weights (default float32)")


def run(args: argparse.Namespace, world: World) -> None:
    import torch

    from swin_quant.base.progress import log
    from swin_quant.cards.paths import card_path
    from swin_quant.tasks.convert import convert

    deployed.refuse_ranks(world, "convert")
    if not args.checkpoint:
        raise UsageError("no checkpoint: name the one to read")
    cfg, target = options.config_of(args), Path(args.to)
    require_file(args.checkpoint, "checkpoint")
    convert(cfg, args.checkpoint, target, getattr(torch, args.dtype), args.replace_head)
    log.info("checkpoint: %s", target)
    log.info("run card: %s", card_path(target))
