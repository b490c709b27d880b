"""swin-quant ft export: `export --for fastertransformer`, with its options alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.cli import export

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

TARGET = "fastertransformer"
HELP = "Export a calibrated checkpoint for FasterTransformer's CUDA ops and TensorRT plugin."
EXAMPLES = """examples:
  python export_ft.py out/swin_tiny_patch4_window7_224_calib.pth --sm 80 --output out/ft
  swin-quant ft export theirs_calib.pth --policy ft-mode2 --sm 75 --check --output out/ft  (without run card)
  swin-quant ft export my.pth --precision float --float-type float16 --output out/ft"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    export.add_export(parser)
    parser.set_defaults(backend=TARGET, opset=None, labels=None, int4_weights=False)


def run(args: argparse.Namespace, world: World) -> None:
    export.run(args, world)
