"""Count the machine code of the CUDA engine's kernels, and predict each launch by it, without a GPU.

    python benchmarks/cuda_static.py [--workers 2] [--models ...] [--precisions int8 float fp8] [--capabilities 90]

Compiles the kernels of these models at batch 1, 8 and 32, apart and fused, that `configs/cuda_counts.csv` lacks, and
writes the file again; a kernel takes some seconds, and one whose sources, types, constants and options are known takes
none. Rows of kernels that are no more are dropped. A stopped run goes on.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from importlib.metadata import version
from math import prod

from swin_quant.backends.cuda.counts import FILE, CountsFile, KernelCounts, count, key_of, read_counts, write_counts
from swin_quant.backends.cuda.crosscompile import OLDEST_FLOAT8
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.required_kernels import kernel_of
from swin_quant.base.shipped import configs_dir
from swin_quant.config import load_config
from swin_quant.config.files import find_config

COUNTS = configs_dir() / FILE
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swinv2_tiny_patch4_window8_256",
    "swinv2_small_patch4_window8_256",
    "swinv2_base_patch4_window8_256",
)
PRECISIONS, BATCHES, CAPABILITIES = ("int8", "float", "fp8"), (32, 1, 8), (90, 89, 80, 120)
SAVED = 20  # compilations between writes
Job = tuple[str, Launch, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--capabilities", nargs="+", type=int, default=CAPABILITIES)
    parser.add_argument("--workers", type=int, default=2, help="processes that compile (default 2)")
    args = parser.parse_args()
    count_missing(list(jobs(args)), args.workers)


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Each distinct kernel with one of its launches; the largest batch first."""
    done = set()
    for capability in args.capabilities:
        for batch in args.batches:
            for precision in args.precisions:
                for name in args.models if precision != "fp8" or capability >= OLDEST_FLOAT8 else ():
                    for launch in launches_of(name, precision, batch):
                        key = key_of(kernel_of(launch).prepare(), capability)
                        if key not in done:
                            done.add(key)
                            yield key, launch, capability


def launches_of(model: str, precision: str, batch: int) -> tuple[Launch, ...]:
    """The launches of a model, apart, and all that fusions can make of them."""
    found = program_of(spec_of_config(load_config(find_config(model)), precision), batch).launches
    return *found, *candidates(found)


def count_missing(wanted: list[Job], workers: int) -> None:
    """Count what the file lacks, and write it meanwhile."""
    before = read_counts(COUNTS)
    known = dict(before.known) if before.triton == version("triton") else {}
    todo = [job for job in wanted if job[0] not in known]
    print(f"{len(wanted)} kernels, {len(todo)} to compile", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for number, (key, found) in enumerate(pool.imap_unordered(counted_job, todo), 1):
            known[key] = found
            if number % SAVED == 0 or number == len(todo):
                write_counts(COUNTS, CountsFile(version("triton"), known))
                print(f"{number} of {len(todo)}", file=sys.stderr, flush=True)


def counted_job(job: Job) -> tuple[str, KernelCounts]:
    key, launch, capability = job
    found = count(launch, capability)
    done = found.counts.operations * found.warps * prod(kernel_of(launch).prepare().grid)
    if launch.products not in ("", "float32") and not 0.99 <= done / launch.operations <= 8:
        print(f"{launch.op} {launch.name} {capability}: {done / launch.operations:.2f} times its products", flush=True)
    return key, found


if __name__ == "__main__":
    main()
