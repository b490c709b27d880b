"""swin-quant analyze."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from torch import Tensor
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.operators.analysis import Analysis

HELP = "What is to be known of a model before it is deployed: operators, targets, shapes, precision risks, limits."
EXAMPLES = """examples:
  swin-quant analyze swin_tiny_patch4_window7_224.pth
  swin-quant analyze --cfg swin_tiny_patch4_window7_224 --machine a100          (shapes alone need no weights)
  swin-quant analyze my.pth --cfg my.yaml --data-path imagenet --pictures 4 --check-replacements
  swin-quant analyze out/my_int8.onnx --batch 8 --target onnxruntime openvino      (the graph alone)
  swin-quant analyze out/my_calib.pth --replace roll gather --target tensorrt --json report.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(
        parser, "checkpoint, float or calibrated, or timm:NAME, hf:NAME; or an ONNX file", head=False
    )
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="pictures at a time (default 1)")
    parser.add_argument("--target", nargs="+", metavar="NAME", help="only these targets (default: all that are known)")
    parser.add_argument("--machine", default="t4", metavar="NAME|FILE",
                        help="whose peaks limits are computed from: t4, a100, h200, ... or a YAML file")  # fmt: skip
    parser.add_argument("--replace", nargs="+", default=[], metavar="NAME",
                        help="replace these operators by equivalent ones first: roll, gather, ...")  # fmt: skip
    parser.add_argument("--check-replacements", action="store_true",
                        help="run each equivalent replacement on the model and compare the outputs")  # fmt: skip
    group = parser.add_argument_group("pictures: what the weights do not show")
    group.add_argument("--data-path", metavar="DIR", help="folder of pictures, or with val/ or its zip; or: digits")
    group.add_argument("--zip", action="store_true", help="val.zip of DIR, even where a folder lies beside it")
    group.add_argument("--pictures", type=whole, default=8, metavar="N", help="how many are looked at (default 8)")
    options.add_json(parser)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.report.analyze import analysis_text
    from swin_quant.report.table import has_colors, json_text, print_text, screen_width

    if world.size > 1:
        raise UsageError("analyze runs in one process: start it without torchrun")
    analysis = _of_file(args) if str(args.checkpoint).endswith(".onnx") else _of_model(args)
    if args.json != "-":
        print_text(analysis_text(analysis, screen_width(80), has_colors()))
    if args.json:
        put(args.json, json_text(analysis.to_dict()))


def _of_file(args: argparse.Namespace) -> Analysis:
    from swin_quant.tasks.analyze_onnx import analyze_onnx

    if args.cfg or args.replace or args.check_replacements or args.data_path:
        raise UsageError(f"{args.checkpoint}: of an ONNX file the graph is analysed alone: give a checkpoint for more")
    return analyze_onnx(Path(args.checkpoint), args.batch, args.target)


def _of_model(args: argparse.Namespace) -> Analysis:
    from swin_quant.tasks.analyze import analyze_checkpoint

    cfg = options.config_of(args, {"checkpoint": options.CONFIG_KEYS["checkpoint"]})
    if args.check_replacements and not args.checkpoint:
        raise UsageError("--check-replacements runs the model: give a checkpoint")
    if args.data_path and not args.checkpoint:
        raise UsageError("--data-path: pictures show nothing without weights: give a checkpoint")
    return analyze_checkpoint(
        cfg,
        args.checkpoint,
        _pictures(args, cfg) if args.data_path else None,
        args.batch,
        machine=args.machine,
        targets=args.target,
        replace=args.replace,
        check=args.check_replacements,
    )


def _pictures(args: argparse.Namespace, cfg: CfgNode) -> Tensor:
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sources import open_pictures
    from swin_quant.tasks.analyze import some_pictures

    shown = open_pictures(args.data_path, "val", zip_mode=args.zip, cache_mode="no")
    return some_pictures(shown, Preprocess.from_config(cfg), args.pictures, cfg.SEED)
