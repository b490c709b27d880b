"""Find the fastest tiles of an artifact's kernels on this GPU, and write them to a file beside it.

    python tools/cuda/tune.py out/my_int8_cuda.safetensors [--batch 1 8 32] [--seconds 300]

The engine takes the file where it lies beside its artifact and was made by the same kernels and compiler on such a GPU;
any other file is left aside with a warning. The file is written again after each kernel, and its entries are not timed
again. Kernels run in another process: one that hangs, dies or corrupts the GPU costs only its own time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from crosscompile import compile_ahead

from swin_quant.backends.cuda.engine import capability_here, check_gpu
from swin_quant.backends.cuda.file import read_network
from swin_quant.backends.cuda.fusions import with_fusions
from swin_quant.backends.cuda.gpu_errors import check_launcher
from swin_quant.backends.cuda.kernels.tiles import FILLED, Tiles, part_columns
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import Launch, TensorRef, kernel_of
from swin_quant.backends.cuda.spec_from_policy import check_batch
from swin_quant.backends.cuda.tuning import (
    TimedTiles,
    here,
    shape_of,
    tiles_path,
    timed_before,
    write_tiles,
)
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir, one_at_a_time
from swin_quant.score.jobs import JobProcess

# rows, columns, warps, stages; `inner` is the default's, and half as much.
GEMM = (
    (128, 128, 8, 3), (128, 64, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (32, 64, 4, 4),
    (32, 32, 2, 4), (128, 256, 8, 3),
)  # fmt: skip
INNER, LEAST_INNER = (1, 0.5), 32
ONE_TILE = ((1, 1), (2, 1), (4, 1), (8, 1))  # warps, stages, if a window is one tile
TRIED_WINDOWS = (2, 4, 8)  # windows a program, if enough programs remain
# factor on the default's warps, stages: with 2, the next window is fetched meanwhile
OF_SEVERAL = ((1, 1), (1, 2), (2, 1), (2, 2))
SEVERAL = ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1), (128, 32, 4, 2), (128, 64, 8, 2), (32, 64, 2, 2),
           (128, 128, 8, 1))  # fmt: skip
ROWS = (0.5, 1, 2)  # factors on the default's rows
WARPS = (4, 8)
STAGES = {
    "norm_gemm": (1, 2, 3),
    "gemm_norm": (1, 2, 3),
    "mlp": (1, 2, 3),
    "attention_norm": (1, 2),
}  # for kernels that loop over weights
RESULTS = "out", "out_quantized"
COPIES, REPEATS, REPLAYS = 3, 10, 7
LEVEL, NEAR, FLOAT8 = 1.0, 0.02, 0.13  # allowed difference: int8 levels, relative, and relative of float8
FEW = 0.05  # the share of values that may differ by more


def tile_choices(op: str, default: Tiles, constants: Mapping[str, Any], programs: int = 0) -> list[Tiles]:
    """The tiles to try for a kernel, the default first, each once. `programs`: the number that the default has."""
    return list(dict.fromkeys([default, *_others(op, default, constants, programs)]))


def _others(op: str, default: Tiles, constants: Mapping[str, Any], programs: int) -> Iterator[Tiles]:
    if op == "gemm":
        steps = {max(LEAST_INNER, int(default.inner * factor)) for factor in INNER}
        fit = [step for step in sorted(steps) if constants["K"] % step == 0]
        yield from (Tiles(r, c, step, w, s) for r, c, w, s in GEMM for step in fit)
    elif op == "attention" and constants["WINDOW"] ** 2 <= default.columns:
        yield from (replace(default, warps=warps, stages=stages, windows=1) for warps, stages in ONE_TILE)
        for windows in TRIED_WINDOWS:
            if programs * default.windows >= FILLED * windows:
                for times, stages in OF_SEVERAL:
                    yield replace(default, warps=times * default.warps, stages=stages, windows=windows)
    elif op == "attention":
        yield from (Tiles(r, c, default.inner, w, s) for r, c, w, s in SEVERAL)
    else:
        least = 16 if op in STAGES or op == "patch_embed" else 1  # rows that a tensor core takes
        sizes = sorted({max(least, int(default.rows * factor)) for factor in ROWS})
        for rows in sizes:
            inner = part_columns(constants["N"], rows) if op == "attention_norm" else default.inner
            for stages in STAGES.get(op, (default.stages,)):
                for warps in sorted({*WARPS, default.warps}):
                    yield replace(default, rows=rows, inner=inner, warps=warps, stages=stages)


def best_tiles(launch: Launch, batch: int, device: torch.device) -> tuple[TimedTiles, float]:
    """Time a launch's candidate tiles on a GPU. Returns the fastest whose results match those of the first that runs
    (the default if it runs), and the default's microseconds, or the fastest's if the default does not run. Raises the
    last error if none runs."""
    copies = [kernel_of(launch, partial(filled, device=device)) for _ in range(COPIES)]
    default, *_ = tried = tiles_to_try(launch)
    times: dict[Tiles, float] = {}
    expected: list[torch.Tensor] = []
    for tiles in tried:
        try:
            found = results_of(launch, tiles, device)
            if expected and not is_same(found, expected):
                raise RuntimeError("it computes something else than the default does")
            expected = expected or found
            times[tiles] = microseconds([partial(one.launch, tiles) for one in copies])
        except Exception as error:  # the tiles do not fit on the GPU, or the compiler refuses them
            last = error
    if not times:
        raise last
    best = min(times, key=times.__getitem__)
    return TimedTiles(launch=shape_of(launch), batch=batch, tiles=best, us=times[best]), times.get(default, times[best])


def results_of(launch: Launch, tiles: Tiles, device: torch.device) -> list[torch.Tensor]:
    """The results of a launch on the same random operands each time."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        kernel = kernel_of(launch, partial(filled, device=device))
    kernel.launch(tiles)
    results = (getattr(kernel, word, None) for word in RESULTS)
    return [result for result in results if result is not None]


def is_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all but a few values agree: sums in another order fall on the other side of a tie, which changes later
    values."""
    for one, other in zip(found, expected, strict=True):
        rounding, is_int8 = FLOAT8 if other.dtype == torch.float8_e4m3fn else NEAR, other.dtype == torch.int8
        one, other = one.float(), other.float()
        step = LEVEL if is_int8 else NEAR * float(other[other.isfinite()].std())
        near = torch.isclose(one, other, rtol=rounding, atol=step, equal_nan=True)
        if (~near).float().mean() > FEW:
            return False
    return True


def tiles_to_try(launch: Launch) -> list[Tiles]:
    """The candidate tiles of a launch, the default first."""
    prepared = kernel_of(launch).prepare()
    return tile_choices(launch.op, prepared.tiles, prepared.constants, prod(prepared.grid))


def filled(ref: TensorRef, device: torch.device) -> torch.Tensor:
    """A random tensor of this shape and type."""
    if ref.dtype in (torch.int8, torch.uint8):
        return torch.randint(-100 if ref.dtype is torch.int8 else 0, 100, ref.shape, dtype=ref.dtype, device=device)
    return torch.randn(ref.shape, device=device).to(ref.dtype)


def microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """The time of one call: the median over replays of a graph that makes all calls several times, in turns.

    Calls on different memory keep the caches from holding what the engine would read from memory.
    """
    for call in calls:
        call()  # compiles the kernel, which a graph must not contain
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # puts the stream back if it fails
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for _ in range(REPEATS):
            for call in calls:
                call()
    graph.replay()
    events = []
    for _ in range(REPLAYS):  # queued back to back, so that the GPU does not wait for launches
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        events.append((first, last))
    torch.cuda.synchronize()
    return statistics.median(1000 * first.elapsed_time(last) / (REPEATS * len(calls)) for first, last in events)


BATCHES, SECONDS = (1, 8, 32), 300.0
COMPILING = 0.5  # the largest share of the time
LONGEST = 120.0  # seconds for one kernel with all of its tiles, including the start of a process


def tune(path: str | Path, batches: Sequence[int] = BATCHES, seconds: float = SECONDS) -> str:
    """Time candidate tiles for every kernel shape of the artifact at `path`, for these batches, until `seconds` are
    over. Returns a line that says what was done.

    Entries of the file for this GPU, these kernels and this compiler are kept. UsageError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError("tune times kernels on a GPU, and torch finds none here")
    if min(batches) < 1 or not 0 < seconds < inf:
        raise UsageError("--batch must be at least 1, and --seconds a number above 0")
    artifact = open_artifact(path)
    spec = read_network(artifact.file).spec
    check_gpu(spec.format)
    check_launcher()
    for batch in batches:
        check_batch(spec, batch)
    place = here()
    file = tiles_path(artifact.file, place.gpu)
    ensure_writable_dir(file.parent)
    lists = {batch: program_of(spec, batch).launches for batch in batches}
    wanted = {
        (shape_of(one), batch): one for batch, found in lists.items() for one in with_fusions(found)
    }  # fused launches too, so that measured times decide
    launches = program_of(spec, 1).launches
    known = {(one["launch"], one["batch"]): one for one in timed_before(file, place, launches)}
    done = {which for which, one in known.items() if one["tiles"]}  # launches that failed are tried again
    todo = {which: launch for which, launch in wanted.items() if which not in done}
    failed, now, before, end = 0, [], [], time.monotonic() + seconds
    choices = ((one, tiles) for one in todo.values() for tiles in tiles_to_try(one))
    compile_ahead(choices, capability_here(), COMPILING * seconds)
    process = JobProcess(time_kernel)
    try:
        for (shape, batch), launch in todo.items():
            if (left := end - time.monotonic()) <= 0:
                break
            try:
                known[shape, batch], default = process.do((launch, batch), min(LONGEST, left))
            except SwinQuantError as error:
                if time.monotonic() >= end:
                    break
                print(f"{launch.name}, batch {batch}: not timed: {error}", file=sys.stderr)
                failed += 1
                known[shape, batch] = TimedTiles(launch=shape, batch=batch, tiles=None, us=None)
            else:
                now.append(known[shape, batch]["us"] or 0.0)
                before.append(default)
            if now:  # a GPU that runs nothing gets no file
                with one_at_a_time(file.parent):  # another process may tune for other batches
                    held = timed_before(file, place, launches, is_told=False)  # a file for another GPU was told of
                    known = {(one["launch"], one["batch"]): one for one in held} | known
                    write_tiles(file, place, list(known.values()))
    finally:
        process.close()
    if failed and not now:
        raise SwinQuantError(f"{artifact.file}: no kernel could be timed on {place.gpu}: see the lines above")
    left_out = len(todo) - len(now) - failed
    return (
        f"{file}: {len(now)} kernels on {place.gpu}: {sum(now):.0f} µs together, by default {sum(before):.0f}; "
        f"{len(wanted) - len(todo)} were timed before, {failed} ran with no tiles, {left_out} were not reached"
    )


def time_kernel(job: tuple[Launch, int]) -> tuple[TimedTiles, float]:
    """Time one launch and batch, in the kernels' process."""
    launch, batch = job
    return best_tiles(launch, batch, torch.device("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", help="a file that `swin-quant export --for cuda` wrote")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most, about (default: %(default)g)")
    args = parser.parse_args()
    try:
        print(tune(args.artifact, args.batch, args.seconds))
    except SwinQuantError as error:
        sys.exit(f"tune.py: {error}")


if __name__ == "__main__":
    main()
