"""Find the fastest tiles of an artifact's kernels on this GPU, and write them to a file beside it.

The file is written again after each kernel, and its entries are not timed again. Kernels run in another process: one
that hangs, dies or corrupts the GPU costs only its own time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.cuda.crosscompile import compile_ahead
from swin_quant.backends.cuda.engine import capability_here, check_gpu
from swin_quant.backends.cuda.file import read_network
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.gpu_errors import check_launcher
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.spec_from_policy import check_batch
from swin_quant.backends.cuda.timing import best_tiles, tiles_to_try
from swin_quant.backends.cuda.tuning import (
    SUFFIX,
    TimedTiles,
    TunedFor,
    here,
    read_timed,
    shape_of,
    tiles_path,
    timed_before,
    write_tiles,
)
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.score.jobs import JobFailed, JobProcess

BATCHES, SECONDS = (1, 8, 32), 300.0
COMPILING = 0.5  # the largest share of the time
LONGEST = 120.0  # seconds for one kernel with all of its tiles, including the start of a process


@dataclass(frozen=True)
class TuneReport:
    """`timed`: launches with their best tiles; `default_us`: their times before; `before`: launches that the file
    already held; `refused`: launches that ran with no tiles, which the file notes; `left`: launches not reached in
    time."""

    file: Path
    gpu: str
    timed: list[TimedTiles]
    default_us: list[float]
    before: int
    refused: int
    left: int


def tune(
    path: str | Path, batches: Sequence[int] = BATCHES, to: str | Path | None = None, seconds: float = SECONDS
) -> TuneReport:
    """Time candidate tiles for every kernel shape of the artifact at `path`, for these batches, until `seconds` are
    over.

    The file is written to `to`, or beside the artifact, where the engine looks for it. Its entries for this GPU, these
    kernels and this compiler are kept. UsageError without a GPU, and for an invalid time or file.
    """
    if not torch.cuda.is_available():
        raise UsageError("tune times kernels on a GPU, and torch finds none here")
    if strange := [batch for batch in batches if batch < 1]:
        raise UsageError(f"‹batch› {strange[0]}: must be at least 1")
    if not 0 < seconds < inf:
        raise UsageError(f"‹seconds› {seconds:g}: must be a number above 0")
    artifact = open_artifact(path)
    spec = read_network(artifact.file).spec
    check_gpu(spec.format)
    check_launcher()
    for batch in batches:
        check_batch(spec, batch)
    place = here()
    file = Path(to or tiles_path(artifact.file, place.gpu))
    if file.is_dir():
        raise UsageError(f"‹to› {file}: is a directory: name a file in it")
    if file.exists() and not file.name.endswith(SUFFIX):
        raise UsageError(f"‹to› {file}: is there already, and no file *{SUFFIX}: name another")
    ensure_writable_dir(file.parent)
    lists = {batch: program_of(spec, batch).launches for batch in batches}
    wanted = {
        (shape_of(one), batch): one for batch, found in lists.items() for one in (*found, *candidates(found))
    }  # fused launches too, so that measured times decide
    launches = program_of(spec, 1).launches
    before = timed_before(file, place, launches)
    known = {(one["launch"], one["batch"]): one for one in before}
    done = {which for which, one in known.items() if one["tiles"]}  # launches that failed are tried again
    todo = {which: launch for which, launch in wanted.items() if which not in done}
    timed, default_us, failed, end = [], [], 0, time.monotonic() + seconds
    ahead = compile_ahead(
        ((one, tiles) for one in todo.values() for tiles in tiles_to_try(one)), capability_here(), COMPILING * seconds
    )
    log.info("%d kernels compiled, %d refused, %d left", ahead.done, len(ahead.refused), ahead.left)
    process = JobProcess(time_kernel)
    try:
        for (shape, batch), launch in todo.items():
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                known[shape, batch], default = process.do((launch, batch), min(LONGEST, left))
            except JobFailed as error:
                if time.monotonic() >= end:
                    break
                log.warning("%s, batch %d: not timed: %s", launch.name, batch, error)
                failed += 1
                known[shape, batch] = TimedTiles(launch=shape, batch=batch, tiles=None, us=None)
            else:
                timed.append(known[shape, batch])
                default_us.append(default)
                log.info("%s, batch %d: %.1f µs, by default %.1f", launch.name, batch, timed[-1]["us"], default)
            if timed:  # a GPU that runs nothing gets no file
                with one_at_a_time(file.parent):  # another process may tune for other batches
                    known = {(one["launch"], one["batch"]): one for one in _held(file, place, launches)} | known
                    write_tiles(file, place, list(known.values()))
    finally:
        process.close()
    if failed and not timed:
        raise SwinQuantError(f"{artifact.file}: no kernel could be timed on {place.gpu}: see the warnings above")
    left = len(todo) - len(timed) - failed
    return TuneReport(file, place.gpu, timed, default_us, len(wanted) - len(todo), failed, left)


def _held(file: Path, place: TunedFor, launches: Sequence[Launch]) -> list[TimedTiles]:
    try:
        return read_timed(file, place, launches)
    except SwinQuantError:  # no file yet, or one for another GPU
        return []


def time_kernel(job: tuple[Launch, int]) -> tuple[TimedTiles, float]:
    """Time one launch and batch, in the kernels' process."""
    launch, batch = job
    return best_tiles(launch, batch, torch.device("cuda"))
