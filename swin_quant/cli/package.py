"""swin-quant package."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.cli import deployed
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Write a folder that runs an ONNX artifact without torch and without this package, alone or in a model server."
EXAMPLES = """examples:
  swin-quant package out/my_int8.onnx --output out/package
  swin-quant package out/my_int8.onnx --max-batch 16 --delay-us 1000 --output out/package --overwrite

In it: model, preprocessing as JSON and in numpy, labels, run card, infer.py, C++, Dockerfile, and a model repository
with configurations of Triton Inference Server, OpenVINO Model Server and KServe (docs/shipping.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported ONNX file; its run card lies beside it")
    parser.add_argument("--output", required=True, metavar="DIR", help="the package: a folder that is not there yet")
    parser.add_argument("--overwrite", action="store_true", help="replace a package that is there")
    parser.add_argument("--labels", metavar="FILE", help="class names, one a line (default: the model's, ImageNet's)")
    group = parser.add_argument_group("servers")
    group.add_argument("--max-batch", type=whole, default=32, metavar="N", help="pictures at a time (default 32)")
    group.add_argument("--delay-us", type=whole, default=2000, metavar="N",
                       help="microseconds that a request waits for others (default 2000)")  # fmt: skip
    group.add_argument("--instances", type=whole, default=1, metavar="N", help="copies of the model (default 1)")
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.ship.repository import Serving
    from swin_quant.tasks.package import Packaging, package

    deployed.refuse_ranks(world, "package")
    serving = Serving(args.max_batch, args.delay_us, args.instances)
    print(package(open_artifact(args.artifact), args.output, Packaging(args.labels, args.overwrite, serving)))
