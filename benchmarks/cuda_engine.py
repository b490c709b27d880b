"""Time the CUDA engine on this GPU, beside torch, torchao and TensorRT with the same networks.

    python benchmarks/cuda_engine.py [--models ...] [--batch 32 1 8 64] [--seconds 480] [--tiles FILE] [--output FOLDER]
    python benchmarks/cuda_engine.py --only-compile [--models ...] [--batch ...] [--seconds 480]

Random weights and ranges from noise cost as much as real ones. Times are the median over replays of a CUDA graph, with
pictures taking turns. `--seconds` limits the whole run: jobs for the goals come first, and jobs not reached are
listed. The same command goes on from cuda_engine.json if GPU, driver, versions, sources and tiles are still the same;
delete it to measure everything again.

Our kernels are compiled first, in as many processes as there are cores; `--only-compile` then ends, and also compiles
kernels for other fusions. Everything else runs in another process, which is replaced after a candidate that hangs,
dies, or corrupts the GPU: that candidate is listed as failed, and comes last in the next run. Our engine fails too if
its logits are not its references': wrong kernels are not timed. Tiles come from `--tiles`, a file of `python
tools/cuda/tune.py`, or from cuda_engine.tiles.json in the output folder.

Writes cuda_engine.md and cuda_engine.json after each result. `--device cpu` is a dry run of this script with micro
models: it measures no GPU. The candidates are in cuda_candidates.py.
"""

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import torch
from cuda_candidates import INPUTS, LAUNCHES, OURS, Job, Place, Timed, measure
from cuda_report import COMPILED, TUNED, Report, Row, named, sources_hash
from cuda_timing import REPLAYS
from cuda_tools import compile_ahead, floor_us
from pages import script_parser, versions_here

from swin_quant.backends.cuda.choose_fusions import fused_program
from swin_quant.backends.cuda.engine import capability_here
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import Launch, Program
from swin_quant.backends.cuda.spec import spec_of_config
from swin_quant.backends.cuda.tuning import SUFFIX, TileTable, here, read_tiles
from swin_quant.base.errors import SwinQuantError
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.operators.roofline import Machine
from swin_quant.score.jobs import JobFailed, JobProcess

V1 = [f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")]
V1.append("swin_large_patch4_window7_224_22kto1k_finetune")
MODELS = (
    *V1,
    *(f"swinv2_{size}_patch4_window8_256" for size in ("tiny", "small", "base")),
    "swin_base_patch4_window12_384_finetune",
    "swin_large_patch4_window12_384_22kto1k_finetune",
    *(f"swinv2_{size}_patch4_window16_256" for size in ("tiny", "small", "base")),
)
FIRST = 4  # the first models, at two batches, come before everything else
QUICK = ("int8", "fp16", "trace fp16", "eager fp16")
ON_CPU = QUICK[:3]
COSTLY = {
    COMPILED: None, TUNED: None, "max-autotune bf16": None, "torchao int8": "torchao", "torchao fp8": "torchao",
    "tensorrt int8": "tensorrt", "tensorrt fp16": "tensorrt",
}  # fmt: skip
APART_FOR = (0, 2)  # models whose launches are timed one by one
WIDER = ("eager tf32", "eager fp32")
LONGEST = dict.fromkeys(COSTLY, 150.0)  # seconds; USUAL for all others
USUAL = 60.0
COMPILING = 0.3  # the largest share of the time
PRECISIONS = ("int8", "float")
LEAST = 5.0  # seconds; a job with less is not started
PACKAGES = ("torch", "triton", "timm", "torchao", "tensorrt")  # times depend on their versions


def main() -> None:
    started = time.monotonic()
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 1, 8, 64])
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--gpu", help="the GPU whose peaks give floors and fusions (default: this one, by its name)")
    parser.add_argument("--tiles", type=Path, help="timed tiles for our kernels")
    parser.add_argument("--only-compile", action="store_true", help="compile our kernels, and measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("out/cuda_engine"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda_engine.py: torch finds no GPU here: nothing was measured")
    if args.device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)  # else kernels are interpreted on the GPU's tensors
    end = started + args.seconds
    place = Place(args.device, args.gpu, args.tiles or (found_tiles(args.output) if args.device == "cuda" else None))
    try:
        machine, tuned = place.machine, place.tuned
    except SwinQuantError as error:
        sys.exit(f"cuda_engine.py: {error}")
    jobs = list(dict.fromkeys(wanted(args.models, args.batch, args.device)))
    rows = {(job.model, job.batch): Row(job.model, job.batch) for job in jobs}
    report = Report(heading(place, machine), rows, made_with(place, machine))
    for row in rows.values():
        plan(row, program(row, "int8", machine, tuned), machine)
    if not args.only_compile:
        print(report.go_on(args.output), flush=True)
        jobs = report.open(jobs)
    if args.device == "cuda":
        ours = {(job.model, job.batch): rows[job.model, job.batch] for job in jobs if job.candidate in OURS}
        launches, share = needed(ours.values(), machine, tuned), COMPILING
        if args.only_compile:
            launches, share = chain(launches, apart(rows.values())), 1.0
        report.notes["kernels of the last run"] = compile_all(launches, share * args.seconds)
        print(report.notes["kernels of the last run"], flush=True)
    if args.only_compile:
        return
    process = JobProcess(partial(measure, place))
    try:
        left = run(jobs, process, report, args.output, end)
    finally:
        process.close()
    print(report.write(args.output, left))
    if not any("int8" in row.ms for row in rows.values()):
        sys.exit("cuda_engine.py: our engine ran on none of them: see what failed")


def made_with(place: Place, machine: Machine | None) -> dict[str, str]:
    """All that a time depends on: times under other conditions belong to another table."""
    return {
        "gpu": torch.cuda.get_device_name() if place.device == "cuda" else "none",
        "driver": versions_here().partition(",")[0],
        "cuda": str(torch.version.cuda),
        **{package: installed(package) for package in PACKAGES},
        "sources": sources_hash(),
        "plan": machine.description if machine else "none",
        "tiles": hashlib.sha256(place.tiles.read_bytes()).hexdigest() if place.tiles else "by default",
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def found_tiles(folder: Path) -> Path | None:
    """The file of tiles, if it was made for this GPU and these kernels."""
    file = folder / f"cuda_engine{SUFFIX}"
    try:
        return file if file.is_file() and read_tiles(file, here()) else None
    except SwinQuantError as error:
        print(f"{error}; the default tiles are used", flush=True)
        return None


def wanted(models: Sequence[str], batches: Sequence[int], device: str) -> Iterator[Job]:
    """All jobs, by importance: first the goals' comparisons, then their explanation, then the rest."""
    if device == "cpu":
        yield from (Job(name, model, batch) for batch in batches for model in models for name in ON_CPU)
        yield from (Job(name, models[0], batches[0]) for name in LAUNCHES)
        return
    first, later = batches[:1], batches[1:2]
    yield from (Job(name, model, batch) for batch in batches[:2] for model in models[:FIRST] for name in QUICK)
    yield from (Job(name, models[0], batch) for batch in first for name in LAUNCHES)
    # torch's best needs torch.compile: one job each, in its fast-compiling mode, comes first.
    yield from (Job(COMPILED, model, batch) for batch in first for model in models[:FIRST])
    there = [name for name, package in COSTLY.items() if package is None or importlib.util.find_spec(package)]
    yield from (Job(name, models[0], batch) for batch in first for name in there)
    yield from (Job(name, model, batch) for batch in batches for model in models for name in QUICK)
    apart_for = [models[number] for number in APART_FOR if number < len(models)]
    yield from (Job(name, model, batch) for batch in batches[:2] for model in apart_for for name in LAUNCHES)
    yield from (Job(TUNED, model, batch) for batch in first for model in models[:FIRST])
    yield from (Job(name, models[0], batch) for batch in later for name in there)
    # Minutes each: the next run does those that this one does not reach.
    yield from (Job(name, model, batch) for batch in batches for model in models for name in (*there, *WIDER))


def run(jobs: list[Job], process: JobProcess, report: Report, folder: Path, end: float) -> list[Job]:
    """Run the jobs and return those that were not reached; a failing job is a line in the table."""
    for number, job in enumerate(jobs):
        left = end - time.monotonic()
        if left < LEAST:
            return jobs[number:]
        try:
            timed: Timed = process.do(job, min(LONGEST.get(job.candidate, USUAL), left))
        except JobFailed as error:
            if time.monotonic() >= end:  # it had less than its time
                return jobs[number:]
            report.failed[named(job)] = str(error)
            print(f"{named(job)}: {error}", flush=True)
        else:
            report.add(job, timed)
            if not timed.lines:
                print(f"{named(job)}: {timed.ms:.3f} ms {timed.note}", flush=True)
        report.write(folder, jobs[number + 1 :])
    return []


def program(row: Row, precision: str, machine: Machine | None, tuned: TileTable) -> Program:
    """The launches of our engine."""
    return fused_program(spec_of_config(load_config(find_config(row.model)), precision), row.batch, machine, tuned)


def needed(rows: Iterable[Row], machine: Machine | None, tuned: TileTable) -> Iterator[tuple[Launch, Tiles | None]]:
    """All launches in our engine's rows, with their tiles."""
    for row in rows:
        for precision in PRECISIONS:
            for one in program(row, precision, machine, tuned).launches:
                yield one, tuned.tiles_for(one, row.batch)


def apart(rows: Iterable[Row]) -> Iterator[tuple[Launch, Tiles | None]]:
    """The launches of rows with one kernel a step, and all fused launches that could replace them."""
    for row in rows:
        for precision in PRECISIONS:
            launches = program_of(spec_of_config(load_config(find_config(row.model)), precision), row.batch).launches
            yield from ((one, None) for one in (*launches, *candidates(launches)))


def compile_all(launches: Iterable[tuple[Launch, Tiles | None]], seconds: float) -> str:
    """Compile our kernels within some seconds; returns a note."""
    started = time.monotonic()
    made = compile_ahead(launches, capability_here(), seconds)
    took = time.monotonic() - started
    said = "".join(f"; {one}" for one in made.refused[:5])
    return f"{made.done} kernels compiled in {took:.0f} s, {len(made.refused)} refused, {made.left} left{said}"


def plan(row: Row, program: Program, machine: Machine | None) -> None:
    """The int8 list's bytes and operations, and the sum of its floors."""
    row.bytes, row.operations = program.bytes_moved, program.operations
    if machine:
        row.floor_ms = sum(floor_us(one, machine) for one in program.launches) / 1000


def heading(place: Place, machine: Machine | None) -> list[str]:
    on_gpu = place.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "DRY RUN ON A CPU: no GPU was used, times mean nothing"
    peaks = f"floors by {machine.description}" if machine else "no GPU: no floors, no fusions"
    tiles = f"tiles of {place.tiles.name}" if place.tiles else "tiles by default"
    return [
        f"# CUDA engine: {where}",
        "",
        f"{versions_here()}; {peaks}; {tiles}. ms: median of {REPLAYS} replays of a CUDA graph, {INPUTS} batches of "
        "pictures in turn; random weights. int8, fp16: ours.",
        "",
    ]


if __name__ == "__main__":
    main()
