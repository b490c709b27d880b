"""swin-quant export-ft: the same as `export --backend fastertransformer`, under FasterTransformer's flags."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.backends.fastertransformer import KINDS
from swin_quant.base.errors import UsageError
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import output_dir

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Export a calibrated checkpoint for FasterTransformer's CUDA ops and TensorRT plugin."
EXAMPLES = """examples:
  python export_ft.py --cfg swin_tiny_patch4_window7_224 --resume out/swin_tiny_patch4_window7_224_calib.pth --sm 80
  python export_ft.py --cfg my.yaml --resume my_calib.pth --int8-mode 2 --sm 75 --check   (a checkpoint without card)
  python export_ft.py --cfg my.yaml --resume my.pth --kind float16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_policy(parser)
    group = parser.add_argument_group("export")
    group.add_argument("--sm", type=whole, default=80, metavar="CC", help="compute capability of the GPU (default 80)")
    group.add_argument("--kind", default="int8", choices=KINDS, help="of the op (default int8)")
    group.add_argument("--batch", type=whole, default=128, metavar="N", help="of the op (default 128)")
    group.add_argument("--fix-gelu-bias", action="store_true",
                       help="undo the kernel's misreading of more than 4096 biases (Swin-L)")  # fmt: skip
    group.add_argument("--check", action="store_true", help="read the export back and compare it with the checkpoint")
    group.add_argument("--output", metavar="DIR", help="results go to DIR/<NAME>/<TAG>/fastertransformer")
    group.add_argument("--tag", help="default: default")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
    from swin_quant.tasks.evaluate import load_for_scoring
    from swin_quant.tasks.export import naming

    if not args.resume:
        raise UsageError("no checkpoint: give --resume FILE")
    cfg = options.config_of(args)
    policies = options.policies_of(args)
    if len(policies) > 1:
        raise UsageError("--policy: one policy is exported at a time")
    subject = load_for_scoring(cfg, args.resume, policies, world, args.replace_head)
    card = replace(subject.card, policy=policies[0].to_dict()) if policies else subject.card
    made = FasterTransformerOptions(args.sm, args.kind, args.batch, args.fix_gelu_bias, args.check)
    folder: Path = output_dir(cfg) / "fastertransformer"
    if world.is_main:
        print(export(subject.model, naming(card, args.resume), folder, made).file)
