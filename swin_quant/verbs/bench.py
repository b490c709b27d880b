"""Latency, images/s, memory and agreement of artifacts, in interleaved rounds with their float baselines."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.cpu import usable_cores
from swin_quant.base.distributed import one_process, this_world
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.data.picture_set import PictureSet
from swin_quant.report.engines import BENCH_FILES, bench_data, bench_table
from swin_quant.report.printed import Printed
from swin_quant.report.table import ReportTable
from swin_quant.score.bench import BenchPlan, BenchReport, load_pictures, measure, noise
from swin_quant.verbs.bench_candidates import bench_candidates

EXAMPLES = """swin-quant bench out/my_int8_openvino.onnx
swin-quant bench out/my_calib.pth --batch 1 8
swin-quant bench out/my_int8.onnx --engine openvino --data-path imagenet --pictures 500 --output docs/results"""
PICTURES = 256
_WITHOUT = ("batch", "upright", "workers", "max_unreadable", "cache_mode", "images", "seed")


@dataclass(frozen=True)
class Benched(Printed):
    """What was measured; printed, it is a table."""

    report: BenchReport

    def tables(self) -> list[ReportTable[Any]]:
        return [bench_table(self.report)]

    def to_json(self) -> Any:
        """The table as data."""
        return bench_data(self.report)

    def check(self) -> None:
        """SwinQuantError where every candidate failed."""
        if all(row.failure for row in self.report.rows):
            raise SwinQuantError("nothing was measured: every candidate failed")


def bench(
    files: Annotated[tuple[str, ...], Parameter(negative="")],
    pictures: Annotated[
        PictureSet | None, Fields(PictureSet, "pictures, on which logits are compared", without=_WITHOUT)
    ] = None,
    *,
    engine: tuple[str, ...] = (),
    float_type: tuple[Literal["float32", "bfloat16", "float16"], ...] = (),
    checkpoint: str | None = None,
    batch: tuple[int, ...] = (1, 8, 32),
    threads: int | None = None,
    rounds: int = 5,
    seconds: float = 1.0,
    output: Annotated[str | None, Parameter(name="--output")] = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Benched:
    """Measure latency, images/s, memory and agreement of artifacts, beside the float model on each engine.

    Each candidate has a process of its own; their blocks of calls take turns, so that drift hits all alike. A
    checkpoint is exported for ONNX Runtime and OpenVINO first. Artifacts of a wrapped module, which only Python builds,
    are measured alone: give its float artifact, too.

    Args:
        files: artifacts or checkpoints of one model, cards beside them
        pictures: A split of a data set, of which 256 pictures are taken (default: seeded noise).
        engine: engines (default: the one an artifact was exported for, else all that take it)
        float_type: type of float layers on OpenVINO (default: float32, and bfloat16 if there)
        checkpoint: the checkpoint that was exported (default: looked for)
        batch: pictures at a time
        threads: threads of every engine (default: all cores)
        rounds: blocks of calls of each candidate
        seconds: seconds of a block
        output: also write bench.md, bench.csv and bench.json there
        device: device of torch and of engines that run on either

    Returns:
        The table.

    Raises:
        SwinQuantError: Every candidate failed.
    """
    one_process("bench")
    count = usable_cores() if threads is None else threads
    plan = BenchPlan(tuple(dict.fromkeys(batch)), rounds, seconds, count)
    if output:
        ensure_writable_dir(output)
    shown = None
    if pictures and pictures.path:
        place = pictures.settled().of_split("val")
        shown = load_pictures(files[0], place.path, place.split or "val", bool(place.zip_mode), place.count or PICTURES)
    with TemporaryDirectory(prefix="swin-quant-bench-") as workspace:
        where = this_world().device.type if device == "cuda" else device
        found = bench_candidates(files, engine, float_type, checkpoint, Path(workspace), count, where)
        log.info("candidates: %s", ", ".join(candidate.name for candidate in found.candidates))
        shown = shown or noise(64, found.shape)
        report = measure(found.card.name, found.candidates, plan, shown, found.has_classes)
    for name, write in BENCH_FILES.items() if output else ():
        atomic_write_bytes(f"{output}/{name}", write(report).encode())
        log.info("table: %s/%s", output, name)
    return Benched(report)
