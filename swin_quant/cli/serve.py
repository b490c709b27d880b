"""swin-quant serve."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.cli import deployed
from swin_quant.cli.numbers import whole

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Serve an artifact over HTTP on this machine: KServe v2 protocol, or a picture in and its classes out."
EXAMPLES = """examples:
  swin-quant serve out/my_int8.onnx
  swin-quant serve out/my_int8.onnx --engine openvino --max-batch 16 --delay-us 1000 --port 8080

  curl --data-binary @cat.jpg localhost:8000/predict

Ctrl-C or SIGTERM ends it: what had come is answered first. More in docs/shipping.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="exported file; its run card lies beside it")
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=whole, default=8000, metavar="N", help="default 8000; 0 is any free one")
    parser.add_argument("--name", help="of the model, in URLs (default: its run card's)")
    parser.add_argument("--labels", metavar="FILE", help="class names, one a line (default: the model's, ImageNet's)")
    deployed.add_engines(parser)
    group = parser.add_argument_group("limits")
    group.add_argument("--max-batch", type=whole, default=8, metavar="N", help="pictures at a time (default 8)")
    group.add_argument("--delay-us", type=whole, default=2000, metavar="N",
                       help="microseconds that a request waits for others (default 2000)")  # fmt: skip
    group.add_argument(
        "--max-queue",
        type=whole,
        default=256,
        metavar="N",
        help="requests that may wait to be decoded, and pictures for the engine (default 256)",
    )
    group.add_argument("--max-megabytes", type=float, default=32, metavar="N", help="of a request (default 32)")
    group.add_argument("--timeout-s", type=float, default=30, metavar="N",
                       help="seconds of a request, from its first byte to its answer (default 30)")  # fmt: skip
    group.add_argument("--max-megapixels", type=float, default=128, metavar="N",
                       help="of a picture, those of every scan of a progressive JPEG (default 128)")  # fmt: skip
    group.add_argument("--budget-megabytes", type=float, default=1024, metavar="N",
                       help="of memory that all requests hold at a time (default 1024)")  # fmt: skip
    group.add_argument("--decoders", type=whole, default=2, metavar="N", help="threads that decode (default 2)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.backends.artifact import open_artifact
    from swin_quant.base.errors import UsageError
    from swin_quant.serving.limits import ServiceLimits
    from swin_quant.tasks.serve import Hosting, serve

    deployed.refuse_ranks(world, "serve")
    if not 1 <= args.decoders <= 256:
        raise UsageError(f"--decoders {args.decoders}: must be from 1 to 256")
    limits = ServiceLimits(args.max_batch, args.delay_us, args.max_queue, args.max_megabytes, args.timeout_s,
                           args.max_megapixels, args.budget_megabytes)  # fmt: skip
    how = Hosting(args.engines, deployed.engine_options(args, world), limits, args.name, args.labels, args.decoders)
    serve(open_artifact(args.artifact), args.host, args.port, how)
