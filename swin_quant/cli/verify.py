"""swin-quant verify."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import finite
from swin_quant.cli import deployed, options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

DEFAULT_COUNT = 64
HELP = "Compare an artifact with the checkpoint it was exported from, on real pictures: pass or fail for each engine."
EXAMPLES = """examples:
  swin-quant verify out/my_int8.onnx --data-path imagenet
  swin-quant verify out/my_int8.onnx --engine openvino --images cat.jpg 'holiday/*.jpg'

A quantized artifact passes when its mean |Δlogit| against fake-quant is below the engine's tolerance, a float one when
that against the float model is. Exit code 1 says that an engine failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported file; its run card lies beside it")
    parser.add_argument("--checkpoint", metavar="FILE", help="what it was made from (default: looked for)")
    parser.add_argument("--pictures", type=whole, default=DEFAULT_COUNT, metavar="N",
                        help=f"pictures, evenly spread over those there are (default {DEFAULT_COUNT})")  # fmt: skip
    deployed.add_engines(parser)
    deployed.add_pictures(parser)
    options.add_json(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.base.progress import log
    from swin_quant.cards.paths import card_path
    from swin_quant.report.table import print_table
    from swin_quant.report.verification import table_of
    from swin_quant.tasks.verify import Verifying, failures, verify_artifact

    deployed.refuse_ranks(world, "verify")
    if args.pictures < 1:
        raise UsageError(f"--pictures {args.pictures}: must be at least 1")
    how = Verifying(args.engines, deployed.engine_options(args, world), args.checkpoint, args.pictures, args.batch,
                    args.workers, args.max_unreadable)  # fmt: skip
    artifact = open_artifact(args.artifact)
    records = verify_artifact(artifact, partial(deployed.pictures_of, args), how, world)
    log.info("run card: %s", card_path(artifact.file))
    if args.json != "-":
        print_table(table_of(records))
    if args.json:
        put(args.json, json.dumps(finite(records), indent=2))
    if failed := failures(records):
        raise SwinQuantError(f"{artifact.file}: verification failed: {'; '.join(failed)}")
