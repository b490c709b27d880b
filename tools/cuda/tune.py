"""Find the fastest tiles of an artifact's kernels on this GPU, and write them into the GPU's file in configs/machines.

    python tools/cuda/tune.py out/my_int8_cuda.safetensors [--batch 1 8 32] [--seconds 300] [--machine FILE]

The file is written again after each kernel, and launches that it holds are not timed again: remove its tiles after an
update of the kernels or of Triton. Where all launches of a batch were timed, fused and apart, their times decide the
fusions of their widths. Kernels run in another process: one that hangs, dies or corrupts the GPU costs only its own
time. `--machine`: write this file instead, which starts as a copy.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, fields, replace
from functools import partial
from importlib.metadata import version
from math import inf, prod
from pathlib import Path

import torch
from crosscompile import compile_ahead
from fusions import BATCHES, MACHINES, choose_table, with_fusions, write_section, write_table
from jobs import JobProcess

from swin_quant.backends.cuda.export import read_network
from swin_quant.backends.cuda.gpu import capability_here, check_gpu, check_launcher, load_machine, own_file
from swin_quant.backends.cuda.kernels.tiles import FILLED, Tiles, part_columns
from swin_quant.backends.cuda.launches import build_program, check_batch
from swin_quant.backends.cuda.program import Launch, TensorRef, format_shape, make_kernel
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir, one_at_a_time

# rows, columns, warps, stages; `inner` is the default's, and half as much.
GEMM = (
    (128, 128, 8, 3), (128, 64, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (32, 64, 4, 4),
    (32, 32, 2, 4), (128, 256, 8, 3),
)  # fmt: skip
INNER, LEAST_INNER = (1, 0.5), 32
ONE_TILE = ((1, 1), (2, 1), (4, 1), (8, 1))  # warps, stages, if a window is one tile
TRIED_WINDOWS = (2, 4, 8)  # windows a program, if enough programs remain
SEVERAL_WINDOWS = ((1, 1), (1, 2), (2, 1), (2, 2))  # factors on warps, stages; with 2, the next window is fetched
SEVERAL = ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1), (128, 32, 4, 2), (128, 64, 8, 2), (32, 64, 2, 2),
           (128, 128, 8, 1))  # fmt: skip
ROWS = (0.5, 1, 2)  # factors on the default's rows
WARPS = (4, 8)
# for kernels that loop over weights
STAGES = {"norm_gemm": (1, 2, 3), "gemm_norm": (1, 2, 3), "mlp": (1, 2, 3), "attention_norm": (1, 2)}
COPIES, REPEATS, REPLAYS = 3, 10, 7
LEVEL, NEAR, FLOAT8 = 1.0, 0.02, 0.13  # allowed difference: int8 levels, relative, and relative of float8
FEW = 0.05  # the share of values that may differ by more
COMPILING, LONGEST = 0.5, 120.0  # the largest share of the time; seconds for one kernel with all of its tiles


def tiles_to_try(launch: Launch, programs: int = 0) -> list[Tiles]:
    """The candidate tiles of a launch, the default first, each once. `programs`: the number that the default has; 0 for
    that of its grid."""
    one, op = make_kernel(launch).prepare(), launch.op
    default, constants = one.tiles, one.constants
    found = [default]
    if op == "gemm":
        steps = {max(LEAST_INNER, int(default.inner * factor)) for factor in INNER}
        fit = [step for step in sorted(steps) if constants["K"] % step == 0]
        found += [Tiles(r, c, step, w, s) for r, c, w, s in GEMM for step in fit]
    elif op == "attention" and constants["WINDOW"] ** 2 <= default.columns:
        found += [replace(default, warps=warps, stages=stages, windows=1) for warps, stages in ONE_TILE]
        for windows in TRIED_WINDOWS:
            if (programs or prod(one.grid)) * default.windows >= FILLED * windows:
                for times, stages in SEVERAL_WINDOWS:
                    found.append(replace(default, warps=times * default.warps, stages=stages, windows=windows))
    elif op == "attention":
        found += [Tiles(r, c, default.inner, w, s) for r, c, w, s in SEVERAL]
    else:
        least = 16 if op in STAGES or op == "patch_embed" else 1  # rows that a tensor core takes
        for rows in sorted({max(least, int(default.rows * factor)) for factor in ROWS}):
            inner = part_columns(constants["N"], rows) if op == "attention_norm" else default.inner
            for stages in STAGES.get(op, (default.stages,)):
                for warps in sorted({*WARPS, default.warps}):
                    found.append(replace(default, rows=rows, inner=inner, warps=warps, stages=stages))
    return list(dict.fromkeys(found))


def best_tiles(launch: Launch, device: torch.device) -> tuple[Tiles, float, float]:
    """Time a launch's candidate tiles on a GPU. Returns the fastest whose results match those of the first that runs
    (the default if it runs), its microseconds, and the default's, or the fastest's if the default does not run. Raises
    the last error if none runs."""
    copies = [make_kernel(launch, partial(filled, device=device)) for _ in range(COPIES)]
    default, *_ = tried = tiles_to_try(launch)
    times: dict[Tiles, float] = {}
    expected: list[torch.Tensor] = []
    for tiles in tried:
        try:
            torch.manual_seed(0)  # the same operands each time
            kernel = make_kernel(launch, partial(filled, device=device))
            kernel.launch(tiles)
            found = [x for word in ("out", "out_quantized") if (x := getattr(kernel, word, None)) is not None]
            if expected and not all(map(is_same, found, expected)):
                raise RuntimeError("it computes something else than the default does")
            expected = expected or found
            times[tiles] = microseconds([partial(one.launch, tiles) for one in copies])
        except Exception as error:  # the tiles do not fit on the GPU, or the compiler refuses them
            last = error
    if not times:
        raise last
    best = min(times, key=times.__getitem__)
    return best, times[best], times.get(default, times[best])


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all but a few values agree: sums in another order fall on the other side of a tie, which changes later
    values."""
    values = expected.float()
    step = LEVEL if expected.dtype == torch.int8 else NEAR * float(values[values.isfinite()].std())
    rounding = FLOAT8 if expected.dtype == torch.float8_e4m3fn else NEAR
    near = torch.isclose(found.float(), values, rtol=rounding, atol=step, equal_nan=True)
    return bool((~near).float().mean() <= FEW)


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
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # puts the stream back if it fails
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


def read_times(file: Path) -> dict[tuple[str, int], list[float]]:
    """Tiles and microseconds by launch and batch, as the file holds them."""
    table = load_machine(str(file)).gpu.tiles
    return {(shape, int(batch)): found for shape, batches in table.items() for batch, found in batches.items()}


def write_tiles(file: Path, known: Mapping[tuple[str, int], Sequence[float]]) -> None:
    """Put tiles and times into a GPU's file, in place of those that are there."""
    lines = ["  tiles:"]
    for shape in dict.fromkeys(shape for shape, _ in known):
        lines.append(f'    "{shape}":')
        found = sorted((batch, list(values)) for (other, batch), values in known.items() if other == shape)
        lines += [f'      "{batch}": {json.dumps(values)}' for batch, values in found]
    about = f"timed by `python tools/cuda/tune.py` on {torch.cuda.get_device_name()}, triton {version('triton')}"
    write_section(file, f"Tiles, {about}: {', '.join(field.name for field in fields(Tiles))}, µs", lines)


def write_fusions(file: Path, lists: Mapping[int, Sequence[Launch]], times: Mapping[tuple[str, int], float]) -> None:
    """Put the fusions of the least sum into a GPU's file, for the widths in batches whose launches were all timed."""
    whole = {
        ("", "", batch): launches
        for batch, launches in lists.items()
        if all((format_shape(one), batch) in times for one in with_fusions(launches))
    }
    if whole:
        table = {key: dict(fusions) for key, fusions in load_machine(str(file)).gpu.fusions.items()}
        measured = choose_table(whole, lambda launch, batch: times[format_shape(launch), batch])
        for operands, fusions in measured.items():
            own = table.setdefault(operands, {})
            own |= {title: {**own.get(title, {}), **widths} for title, widths in fusions.items()}
        write_table(file, table, "estimated, except of launches whose tiles `python tools/cuda/tune.py` timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", help="a file that `swin-quant export --for cuda` wrote")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, about (default: %(default)g)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="write this file, which starts as a copy")
    args = parser.parse_args()
    try:
        print(tune(args.artifact, args.batch, args.seconds, args.machine))
    except SwinQuantError as error:
        sys.exit(f"tune.py: {error}")


def tune(path: str, batches: Sequence[int], seconds: float, machine: Path | None) -> str:
    """Time candidate tiles for every kernel shape of the artifact at `path`, for these batches, until `seconds` are
    over, and write them into the file `machine`, by default this GPU's. Returns a line that says what was done.

    UsageError without a GPU, and for one that has no file.
    """
    if not torch.cuda.is_available():
        raise UsageError("tune times kernels on a GPU, and torch finds none here")
    if min(batches) < 1 or not 0 < seconds < inf:
        raise UsageError("--batch must be at least 1, and --seconds a number above 0")
    spec, gpu = read_network(open_artifact(path).file).spec, torch.cuda.get_device_name()
    check_gpu(spec.format)
    check_launcher()
    for batch in batches:
        check_batch(spec, batch)
    if (name := own_file(gpu)) is None:
        raise UsageError(f"{gpu}: has no file in {MACHINES}: add one (CONTRIBUTING.md, Adding)")
    file = machine or MACHINES / f"{name}.yaml"
    ensure_writable_dir(file.parent)
    if not file.exists():
        shutil.copyfile(MACHINES / f"{name}.yaml", file)
    lists = {batch: build_program(spec, batch).launches for batch in batches}
    wanted = {(format_shape(one), batch): one for batch, found in lists.items() for one in with_fusions(found)}
    known = read_times(file)
    todo = {which: launch for which, launch in wanted.items() if which not in known}
    failed, now, before, end = set[tuple[str, int]](), [], [], time.monotonic() + seconds
    choices = ((one, tiles) for one in todo.values() for tiles in tiles_to_try(one))
    compile_ahead(choices, capability_here(), COMPILING * seconds)
    with closing(JobProcess(partial(best_tiles, device=torch.device("cuda")))) as process:
        for (shape, batch), launch in todo.items():
            if (left := end - time.monotonic()) <= 0:
                break
            try:
                tiles, us, default = process.do(launch, min(LONGEST, left))
            except SwinQuantError as error:
                if time.monotonic() >= end:
                    break
                print(f"{launch.name}, batch {batch}: not timed: {error}", file=sys.stderr)
                failed.add((shape, batch))
                continue
            now.append(us)
            before.append(default)
            with one_at_a_time(file.parent):  # another process may tune for other batches
                known = {**read_times(file), (shape, batch): [*astuple(tiles), round(us, 2)]}
                write_tiles(file, known)
    if failed and not now:
        raise SwinQuantError(f"{path}: no kernel could be timed on {gpu}: see the lines above")
    write_fusions(file, lists, {which: found[-1] for which, found in known.items()} | dict.fromkeys(failed, inf))
    timed = f"{len(now)} kernels on {gpu}: {sum(now):.0f} µs together, by default {sum(before):.0f}"
    left_out = f"{len(failed)} ran with no tiles, {len(todo) - len(now) - len(failed)} were not reached"
    return f"{file}: {timed}; {len(wanted) - len(todo)} were timed before, {left_out}"


if __name__ == "__main__":
    main()
