"""Latency, images/s, memory and agreement of artifacts, in interleaved rounds with their float baselines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from swin_quant.base.cpu import usable_cores
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import tell
from swin_quant.report.table import print_table

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

EXAMPLES = """examples:
  swin-quant bench out/my_int8_openvino.onnx
  swin-quant bench out/my_calib.pth --batch 1 8                      (exported for ONNX Runtime and OpenVINO first)
  swin-quant bench out/my_int8.onnx --engine openvino --data-path imagenet --pictures 500 --output docs/results

Always measured beside them: the float32 model in torch, and float32 (where the CPU has it, bfloat16) on every ONNX
engine. Each candidate has a process of its own; their blocks of calls take turns, so that drift hits all alike.
Artifacts of a wrapped module, which only Python builds, are measured alone: give its float artifact, too."""


@dataclass(frozen=True)
class MeasuringOptions:
    """How candidates are timed."""

    TITLE = "measuring"
    batch: Annotated[tuple[int, ...], Flag("default 1 8 32", "N")] = (1, 8, 32)
    threads: Annotated[int | None, Flag(f"threads of every engine (default: all cores, {usable_cores()})", "N")] = None
    rounds: Annotated[int, Flag("default 5", "N")] = 5
    seconds: Annotated[float, Flag("seconds of a block of calls (default 1)", "S")] = 1.0


@dataclass(frozen=True)
class ComparingOptions(shared.SplitOptions):
    """Pictures on which logits are compared."""

    TITLE = "pictures, on which logits are compared (default: seeded noise)"
    pictures: shared.Evenly = 256


@dataclass(frozen=True)
class BenchOptions:
    """The candidates of a bench, their engines, and how they are timed."""

    files: Annotated[
        tuple[str, ...], Flag("artifacts or checkpoints of one model, cards beside them", "FILE", place=True)
    ]
    engine: Annotated[
        tuple[str, ...], Flag("default: the one an artifact was exported for, else all that take it", "NAME")
    ] = ()
    float_type: Annotated[
        tuple[str, ...],
        Flag(
            "type of float layers on OpenVINO (default: float32, and bfloat16 if there)",
            choices=("float32", "bfloat16", "float16"),
        ),
    ] = ()
    checkpoint: shared.MadeFrom = None
    measuring: MeasuringOptions = MeasuringOptions()
    comparing: ComparingOptions = ComparingOptions()
    output: Annotated[str | None, Flag("also write bench.md, bench.csv and bench.json there", "DIR")] = None
    json: shared.Json = None
    device: Annotated[
        Literal["cpu", "cuda"], Flag("device of torch and of engines that run on either (default cpu)")
    ] = "cpu"


def run(options: BenchOptions, world: World) -> None:
    from swin_quant.report.engines import BENCH_FILES, bench_data, bench_table
    from swin_quant.score.bench import BenchPlan, load_pictures, measure, noise
    from swin_quant.verbs.bench_candidates import bench_candidates

    shared.one_process(world, "bench")
    how, place = options.measuring, options.comparing
    threads = usable_cores() if how.threads is None else how.threads
    plan = BenchPlan(tuple(dict.fromkeys(how.batch)), how.rounds, how.seconds, threads)
    if options.output:
        ensure_writable_dir(options.output)
    shown = None
    if place.data_path:
        shown = load_pictures(options.files[0], place.data_path, place.split, place.zip, place.pictures)
    asked = options.files, options.engine, options.float_type, options.checkpoint
    with TemporaryDirectory(prefix="swin-quant-bench-") as workspace:
        found = bench_candidates(*asked, Path(workspace), threads, world.device.type)
        log.info("candidates: %s", ", ".join(candidate.name for candidate in found.candidates))
        shown = shown or noise(64, found.shape)
        report = measure(found.card.name, found.candidates, plan, shown, found.has_classes)
    if options.output:
        for name, write in BENCH_FILES.items():
            atomic_write_bytes(f"{options.output}/{name}", write(report).encode())
            log.info("table: %s/%s", options.output, name)
    tell(options.json, lambda: print_table(bench_table(report)), bench_data(report))
    if all(row.failure for row in report.rows):
        raise SwinQuantError("nothing was measured: every candidate failed")
