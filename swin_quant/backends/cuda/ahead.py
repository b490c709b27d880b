"""Compile kernels before their first launch, in several processes: Triton itself compiles one after another.

The results go into Triton's cache on disk, under the names that the launches look up. No GPU is needed.
"""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass

from swin_quant.backends.cuda.crosscompile import KernelCall, compiled
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.required_kernels import kernels_with_tiles
from swin_quant.base.progress import log


@dataclass(frozen=True)
class CompiledAhead:
    """`done`: kernels compiled, or found in the cache; `refused`: each kernel with the compiler's error; `left`:
    kernels that were not reached."""

    done: int
    refused: tuple[str, ...]
    left: int


def compile_ahead(
    wanted: Iterable[tuple[Launch, Tiles | None]], capability: int, seconds: float, processes: int | None = None
) -> CompiledAhead:
    """Compile the kernels of the `wanted` launches with these tiles (None: the default) for a GPU of compute
    `capability`.

    Stops after about `seconds` and ends its processes, so that later work has all cores. It raises nothing: Triton
    compiles the kernels that are left at their first launch.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return CompiledAhead(0, (), 0)
    end = time.monotonic() + seconds
    calls = kernels_with_tiles(wanted)
    context = multiprocessing.get_context("forkserver")  # a process with a GPU's context cannot be forked
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(min(processes or len(os.sched_getaffinity(0)), max(len(calls), 1)), context)
    done, refused, others = 0, [], set(multiprocessing.active_children())
    futures = {pool.submit(compile_one, call, capability): call.name for call in calls}
    workers = set(multiprocessing.active_children()) - others
    try:
        for future in as_completed(futures, max(0.0, end - time.monotonic())):
            if said := future.result():
                refused.append(f"{futures[future]}: {said}")
            done += 1
    except concurrent.futures.TimeoutError:  # in Python 3.10 this is not the built-in TimeoutError
        log.info("compiling ahead: %d of %d kernels in %.0f s", done, len(calls), seconds)
    except Exception as error:  # a pool that breaks costs time, not the work
        log.warning("compiling ahead ended (%s): kernels are compiled at their first launch", error)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if done < len(calls):
            for worker in workers:  # they would finish the kernels that they have begun
                worker.kill()
    return CompiledAhead(done - len(refused), tuple(refused), len(calls) - done)


def compile_one(call: KernelCall, capability: int) -> str:
    """Compile one kernel in a process of the pool. Returns "" or the compiler's error."""
    try:
        source, made = compiled(call, capability)
    # tiles that do not fit: the tuner leaves them out
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    with suppress(Exception):  # without the driver, or with a Triton that has no such class
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, made.metadata)  # the launcher in C, one for each signature
    return ""
