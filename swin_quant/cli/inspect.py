"""swin-quant inspect."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.backends.registry import engines_for
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import finite
from swin_quant.base.reading import reading
from swin_quant.cli import options
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "What is in an ONNX file: which products are int8, which attention fuses, what an engine will not fuse, and why."
EXAMPLES = """examples:
  swin-quant inspect out/swin_tiny_int8.onnx
  swin-quant inspect out/swin_tiny_int8.onnx --engine tensorrt --json report.json
  swin-quant inspect some_swin_of_timm.onnx                                 (any ONNX file; what is unknown is said)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx")
    parser.add_argument(
        "--engine", choices=engines_for("onnx"), help="only what this engine will not fuse (default: all)"
    )
    options.add_json(parser)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.onnx_reader.file import read_model
    from swin_quant.backends.onnx_reader.inspect import inspect_model
    from swin_quant.report.inspect import inspection_text
    from swin_quant.report.table import has_colors, print_text, screen_width

    if not world.is_main:
        return
    try:
        with reading(args.model, "ONNX file"):
            report = inspect_model(read_model(Path(args.model)), [args.engine] if args.engine else None)
    except SwinQuantError as error:
        named = str(error).startswith(args.model)
        raise error if named else SwinQuantError(f"{args.model}: {error}") from error
    if args.json != "-":
        print_text(inspection_text(report, screen_width(), has_colors()))
    if args.json:
        put(args.json, json.dumps(finite({"file": Path(args.model).name, **report.to_dict()}), indent=2))
