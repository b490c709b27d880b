"""Kernels compiled before they are launched, by several processes at once: Triton itself compiles one after another.

They are put into Triton's cache on disk, under the names by which the launches then look for them. No GPU is touched.
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
    """How many kernels were compiled (or lay in the cache), which the compiler refused and why, how many are left."""

    done: int
    refused: tuple[str, ...]
    left: int


def compile_ahead(
    wanted: Iterable[tuple[Launch, Tiles | None]], capability: int, seconds: float, processes: int | None = None
) -> CompiledAhead:
    """Compile what `wanted` launches need with these tiles (None: their default) for a GPU of compute `capability`.

    It ends after about `seconds`, and so do its processes: what follows has all cores. Whatever was not compiled is
    compiled at its first launch: nothing here is an error.
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
    except concurrent.futures.TimeoutError:  # another than Python's own in 3.10
        log.info("compiling ahead: %d of %d kernels in %.0f s", done, len(calls), seconds)
    except Exception as error:  # a pool that breaks costs time, not the work
        log.warning("compiling ahead ended (%s): kernels are compiled at their first launch", error)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if done < len(calls):
            for worker in workers:  # which would compile to the end what they have begun
                worker.kill()
    return CompiledAhead(done - len(refused), tuple(refused), len(calls) - done)


def compile_one(call: KernelCall, capability: int) -> str:
    """In a process of the pool: "" or what the compiler said."""
    try:
        source, made = compiled(call, capability)
    except Exception as error:  # tiles that a GPU has no room for: the tuner meets them, and leaves them out
        return f"{type(error).__name__}: {str(error)[:200]}"
    with suppress(Exception):  # a machine without the driver, or a Triton that needs no such half
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, made.metadata)  # the half of a launch that is in C, one for each signature
    return ""
