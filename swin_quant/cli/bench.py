"""swin-quant bench."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.cli import options
from swin_quant.cli.numbers import whole
from swin_quant.cli.output import put
from swin_quant.score.cpu import usable_cores

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

HELP = "Latency, images/s, memory and agreement of artifacts, in interleaved rounds with their float baselines."
EXAMPLES = """examples:
  swin-quant bench out/my_int8_openvino.onnx
  swin-quant bench out/my_calib.pth --batch 1 8                      (exported for ONNX Runtime and OpenVINO first)
  swin-quant bench out/my_int8.onnx --engine openvino --data-path imagenet --pictures 500 --output docs/results

Always measured beside them: the float32 model in torch, and float32 (where the CPU has it, bfloat16) on every ONNX
engine. Each candidate has a process of its own; their blocks of calls take turns, so that drift hits all alike."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="artifacts or checkpoints of one model, cards beside them"
    )
    parser.add_argument("--engine", nargs="+", metavar="NAME", dest="engines",
                        help="default: what an artifact was exported for, else all that take it")  # fmt: skip
    parser.add_argument("--float-type", nargs="+", choices=("float32", "bfloat16", "float16"), dest="float_types",
                        help="of what is not int8, on OpenVINO (default: float32, and bfloat16 if there)")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="FILE", help="what they were made from (default: looked for)")
    group = parser.add_argument_group("measuring")
    group.add_argument("--batch", type=whole, nargs="+", default=[1, 8, 32], metavar="N", help="default 1 8 32")
    group.add_argument(
        "--threads", type=whole, metavar="N", help=f"of every engine (default: all cores, {usable_cores()})"
    )
    group.add_argument("--rounds", type=whole, default=5, metavar="N", help="default 5")
    group.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of a block of calls (default 1)")
    group = parser.add_argument_group("pictures: what logits are compared on (default: seeded noise)")
    group.add_argument("--data-path", metavar="DIR", help="folder with val/, or its zip; or: digits")
    group.add_argument("--zip", action="store_true", help="the zip of the split, even where a folder lies beside it")
    group.add_argument("--split", default="val", help="default val")
    group.add_argument("--pictures", type=whole, default=256, metavar="N", help="evenly spread over those there are")
    parser.add_argument("--output", metavar="DIR", help="also write bench.md, bench.csv and bench.json there")
    options.add_json(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="of torch, and of engines that run on either (default cpu)")  # fmt: skip


def run(args: argparse.Namespace, world: World) -> None:
    if world.size > 1:
        raise UsageError("bench runs in one process: start it without torchrun")
    from swin_quant.base.progress import log
    from swin_quant.report import bench as table
    from swin_quant.report.table import print_table
    from swin_quant.score.bench import BenchPlan, load_pictures
    from swin_quant.tasks.bench import bench

    if args.pictures < 1:
        raise UsageError(f"--pictures {args.pictures}: must be at least 1")
    threads = usable_cores() if args.threads is None else args.threads
    plan = BenchPlan(tuple(dict.fromkeys(args.batch)), args.rounds, args.seconds, threads)
    if args.output:
        ensure_writable_dir(args.output)
    shown = None
    if args.data_path:
        shown = load_pictures(args.files[0], args.data_path, args.split, args.zip, args.pictures)
    device = world.device.type
    report = bench(args.files, plan, shown, args.engines, args.float_types, args.checkpoint, device)
    if args.output:
        for name, write in table.FILES.items():
            atomic_write_bytes(f"{args.output}/{name}", write(report).encode())
            log.info("table: %s/%s", args.output, name)
    if args.json != "-":
        print_table(table.table_of(report))
    if args.json:
        put(args.json, table.as_json(report))
    if all(row.failure for row in report.rows):
        raise SwinQuantError("nothing was measured: every candidate failed")
