"""swin-quant tune."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import UsageError
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Time the CUDA engine's kernels on this GPU and keep the fastest tiles in a file beside the artifact."
EXAMPLES = """examples:
  swin-quant tune out/my_int8_cuda.safetensors
  swin-quant tune out/my_int8_cuda.safetensors --batch 1 64 --seconds 600

The file is written after each kernel: a run that was ended, or had too little time, goes on when it is started again.
The engine takes the file where it lies beside its artifact and was made by the same kernels and compiler on such a GPU;
one of others is left aside with a warning. Without a file the engine runs with tiles that suit most GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="what `export --for cuda` wrote")
    parser.add_argument("--batch", type=whole, nargs="+", default=[1, 8, 32], metavar="N", help="default 1 8 32")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="at most, about (default 300)")
    parser.add_argument("--to", metavar="FILE", help="the file (default: beside the artifact, NAME.GPU.tiles.json)")


def run(args: argparse.Namespace, world: World) -> None:
    if world.size > 1:
        raise UsageError("tune runs in one process: start it without torchrun")
    from swin_quant.tasks.tune import tune

    report = tune(args.artifact, args.batch, args.to, args.seconds)
    now, before = sum(one["us"] or 0.0 for one in report.timed), sum(report.default_us)
    kernels = f"{len(report.timed)} kernels on {report.gpu}: {now:.0f} µs together, by default {before:.0f}"
    known = f"; {report.before} were timed before" if report.before else ""
    refused = f"; {report.refused} ran with no tiles, and are not chosen" if report.refused else ""
    left = f"; {report.left} were not reached: start it again, or give more --seconds" if report.left else ""
    print(f"{report.file}: {kernels}{known}{refused}{left}")
