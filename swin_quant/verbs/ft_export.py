"""Export a calibrated checkpoint for FasterTransformer's CUDA ops and TensorRT plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swin_quant.verbs import export

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EXAMPLES = """examples:
  python export_ft.py out/swin_tiny_patch4_window7_224_calib.pth --sm 80 --output out/ft
  swin-quant ft export theirs_calib.pth --policy ft-mode2 --sm 75 --check --output out/ft  (without run card)
  swin-quant ft export my.pth --precision float --float-type float16 --output out/ft"""
OPTIONS = export.TargetOptions


def run(options: export.TargetOptions, world: World) -> None:
    export.run(export.ExportOptions(backend="fastertransformer", **vars(options)), world)
