"""swin-quant build-engine."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.cli import deployed
from swin_quant.cli.numbers import whole
from swin_quant.verbs.verify import PICTURES as DEFAULT_COUNT

if TYPE_CHECKING:
    from swin_quant.base.distributed import World
    from swin_quant.data.pictures import Pictures

HELP = "Build a TensorRT engine for this GPU from an exported ONNX file, report what runs in int8, and verify it."
EXAMPLES = """examples:
  swin-quant build-engine out/swin_tiny_int8.onnx --data-path imagenet
  swin-quant build-engine out/swin_tiny_int8.onnx --max-batch 64 --timing-cache trt.cache --no-verify
The trtexec line of the same build is printed first, also where TensorRT is not installed. The engine's logits are
compared with the checkpoint's at the end, as `verify` does; exit code 1 says that they are too far off."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx", help="exported file; its run card lies beside it")
    parser.add_argument("--output", metavar="DIR", help="folder of MODEL_sm<NN>.engine (default: the model's)")
    parser.add_argument("--min-batch", type=whole, default=1, metavar="N", help="smallest batch (default 1)")
    parser.add_argument("--opt-batch", type=whole, default=8, metavar="N", help="batch it is tuned for (default 8)")
    parser.add_argument("--max-batch", type=whole, default=32, metavar="N", help="largest batch (default 32)")
    parser.add_argument("--workspace", type=whole, metavar="MIB", help="limit of scratch memory (default: none)")
    parser.add_argument("--timing-cache", metavar="FILE", help="kernel timings to start from, and to keep")
    parser.add_argument("--allow-float32", action="store_true", help="take an int8 graph whose float part is float32")
    group = parser.add_argument_group("verification")
    group.add_argument("--no-verify", action="store_true", help="leave it out; no pictures are needed then")
    group.add_argument("--checkpoint", metavar="FILE", help="what the model was made from (default: looked for)")
    group.add_argument("--pictures", type=whole, default=DEFAULT_COUNT, metavar="N",
                       help=f"pictures, evenly spread over those there are (default {DEFAULT_COUNT})")  # fmt: skip
    deployed.add_pictures(parser)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.tensorrt.plan import BuildOptions
    from swin_quant.base.progress import log
    from swin_quant.report.table import print_table
    from swin_quant.report.verification import products_table, table_of
    from swin_quant.tasks.build_engine import build_engine, verify_engine
    from swin_quant.verbs.verify import Verifying, failures

    if not world.is_main:
        return
    if args.pictures < 1:
        raise UsageError(f"--pictures {args.pictures}: must be at least 1")
    cache = Path(args.timing_cache) if args.timing_cache else None
    batches = (args.min_batch, args.opt_batch, args.max_batch)
    options = BuildOptions(*batches, args.workspace, cache, args.allow_float32)
    how = Verifying(checkpoint=args.checkpoint, count=args.pictures, batch_size=min(args.batch, args.max_batch),
                    workers=args.workers, max_unreadable=args.max_unreadable)  # fmt: skip
    shown = None if args.no_verify else partial(_pictures, args)
    built = build_engine(args.model, options, args.output, shown, args.checkpoint)
    print_table(products_table(built.layers))
    if lost := built.layers.lost:
        wanted = " and ".join(dict.fromkeys(row.wanted for row in lost))
        log.warning("%s in the graph, not in the engine: %s", wanted, listed(row.name for row in lost))
    log.info("engine: %s", built.artifact.file)
    records = verify_engine(built, how, world)  # the engine took minutes: what raises here must not hide it
    if records is None:
        log.warning(
            "not verified: compare it on this GPU before it is used: `swin-quant verify %s`", built.artifact.file
        )
        return
    print_table(table_of(records))
    if failed := failures(records):
        raise SwinQuantError(
            f"{built.artifact.file}: verification failed: {'; '.join(failed)}: do not use this engine: build it with "
            "another TensorRT, or from an export with precision float, which tells whose fault it is"
        )


def _pictures(args: argparse.Namespace) -> Pictures:
    if not args.data_path and not args.images:
        raise UsageError(
            "the engine is verified on real pictures: give --data-path DIR or --images PLACE ..., or --no-verify"
        )
    return deployed.pictures_of(args)
