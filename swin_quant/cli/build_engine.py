"""swin-quant build-engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swin_quant.base.errors import listed
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Build a TensorRT engine for this GPU from an exported ONNX file, and report which layers really run in int8."
EXAMPLES = """examples:
  swin-quant build-engine out/swin_tiny_int8.onnx
  swin-quant build-engine out/swin_tiny_int8.onnx --max-batch 64 --opt-batch 64 --timing-cache trt.cache
The trtexec line of the same build is printed first, also where TensorRT is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx", help="exported file; its run card lies beside it")
    parser.add_argument("--output", metavar="DIR", help="folder of MODEL_sm<NN>.engine (default: the model's)")
    parser.add_argument("--min-batch", type=whole, default=1, metavar="N", help="smallest batch (default 1)")
    parser.add_argument("--opt-batch", type=whole, default=8, metavar="N", help="batch it is tuned for (default 8)")
    parser.add_argument("--max-batch", type=whole, default=32, metavar="N", help="largest batch (default 32)")
    parser.add_argument("--workspace", type=whole, metavar="MIB", help="limit of scratch memory (default: none)")
    parser.add_argument("--timing-cache", metavar="FILE", help="kernel timings to start from, and to keep")
    parser.add_argument("--allow-float32", action="store_true", help="take an int8 graph whose float part is float32")


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.tensorrt.plan import BuildOptions
    from swin_quant.base.progress import log
    from swin_quant.report.layers import table_of
    from swin_quant.report.screen import print_table
    from swin_quant.tasks.build_engine import build_engine

    if not world.is_main:
        return
    cache = Path(args.timing_cache) if args.timing_cache else None
    batches = (args.min_batch, args.opt_batch, args.max_batch)
    artifact, layers = build_engine(
        args.model, BuildOptions(*batches, args.workspace, cache, args.allow_float32), args.output
    )
    print_table(table_of(layers))
    if layers.lost:
        log.warning("int8 in the graph, not in the engine: %s", listed(row.name for row in layers.lost))
    log.info("engine: %s", artifact.file)
