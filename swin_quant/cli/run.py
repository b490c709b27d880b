"""swin-quant run."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from swin_quant.cli import deployed

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Run an artifact on pictures and write its logits for other programs."
EXAMPLES = """examples:
  swin-quant run out/my_int8.onnx --data-path imagenet --output out
  swin-quant run out/my_int8.onnx --engine openvino --images 'holiday/*.jpg' --output out

numpy.load("out/my_int8_logits.npz") holds: names, text [N]; logits, float32 [N, classes]; top1, int64 [N];
labels, int64 [N], -1 where there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported file; its run card lies beside it")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for <ARTIFACT>_logits.npz")
    deployed.add_engines(parser)
    deployed.add_pictures(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.tasks.run import run_artifact
    from swin_quant.tasks.verify import Verifying

    deployed.refuse_ranks(world, "run")
    how = Verifying(args.engines, deployed.engine_options(args, world), batch_size=args.batch, workers=args.workers,
                    max_unreadable=args.max_unreadable)  # fmt: skip
    run_artifact(open_artifact(args.artifact), partial(deployed.pictures_of, args), args.output, how)
