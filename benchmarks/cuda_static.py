"""Count the machine code of the CUDA engine's kernels, and predict each launch by it: writes configs/cuda_counts.csv,
docs/results/cuda_static.md and .csv. No GPU is needed.

    python benchmarks/cuda_static.py [--workers 2] [--models ...] [--precisions int8 float fp8] [--capabilities 90 89]

Compiles the kernels of these models at batch 1, 8 and 32, apart and fused, that the file of counts lacks; one whose
sources, types, constants and options are known is not compiled again. Rows of kernels that are no more are dropped. A
stopped run goes on. With --predict, nothing is compiled: the pages are written from the counts at hand.
"""

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from math import prod

from pages import RESULTS, ROOT, script_parser, write_table

from swin_quant.backends.cuda.counts import (
    FILE,
    CountsFile,
    KernelCounts,
    count,
    key_of,
    read_counts,
    shipped_counts,
    write_counts,
)
from swin_quant.backends.cuda.crosscompile import OLDEST_FLOAT8, kernel_of
from swin_quant.backends.cuda.estimates import LAUNCHING, REACHED
from swin_quant.backends.cuda.fusions import with_fusions
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import ESTIMATED, FP8, FP16, INT8, StaticPlan, spec_of_config, static_plan
from swin_quant.backends.cuda.program import Launch
from swin_quant.base.errors import UsageError
from swin_quant.base.files import configs_dir
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.operators.roofline import load_machine
from swin_quant.report.plan import static_columns, static_rows

sys.path.insert(0, str(ROOT))
from tests.helpers.instructions import instructions, probes  # noqa: E402

PAGE = RESULTS / "cuda_static.md"
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
GPUS, IN_FULL = ("h200", "h100", "l40s", "a100", "rtx5090"), ("h200", "h100")
BY_ISSUE = "issue", "alu", "fma", "special", "loads"
AT_FIRST = {  # the counts of commit 09dd383d, and the goals
    "GELU, an element": (30.9, 16),
    "rounding to int8, an element": (4.2, 2.5),
    "attention, a logit": (22.5, 12),
    "attention with a shift, a logit": (46.0, 12),
}
SAVED = 20  # compilations between writes
Job = tuple[str, Launch, int]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--capabilities", nargs="+", type=int, default=CAPABILITIES)
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile (default 2)")
    args = parser.parse_args()
    if not args.predict:
        count_missing(list(jobs(args)), args.workers)
        drop_old(parser.parse_args([]))
    plans = list(predicted())
    write_table(PAGE.with_suffix(".csv"), *table(plans))
    PAGE.write_text("".join(page(plans)), encoding="utf-8")
    print(f"{PAGE}: {len(plans)} plans")


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Each distinct kernel with one of its launches; the largest batch first."""
    done = set()
    for launch in probes().values():
        done.add(key := key_of(kernel_of(launch).prepare(), 90))
        yield key, launch, 90
    for capability in args.capabilities:
        for batch in args.batches:
            for precision in args.precisions:
                for name in args.models if precision != "fp8" or capability >= OLDEST_FLOAT8 else ():
                    for launch in launches_of(name, precision, batch):
                        key = key_of(kernel_of(launch).prepare(), capability)
                        if key not in done:
                            done.add(key)
                            yield key, launch, capability


def launches_of(model: str, precision: str, batch: int) -> list[Launch]:
    """The launches of a model without fusions, and every launch that fusions can make of them."""
    return with_fusions(program_of(spec_of_config(load_config(find_config(model)), precision), batch).launches)


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


def drop_old(everything: argparse.Namespace) -> None:
    """Write the file without kernels that are no more."""
    known, used = read_counts(COUNTS), {key for key, *_ in jobs(everything)}
    write_counts(COUNTS, CountsFile(known.triton, {key: one for key, one in known.known.items() if key in used}))


def counted_job(job: Job) -> tuple[str, KernelCounts]:
    key, launch, capability = job
    found = count(launch, capability)
    done = found.counts.operations * found.warps * prod(kernel_of(launch).prepare().grid)
    if launch.products not in ("", "float32") and not 0.99 <= done / launch.operations <= 8:
        print(f"{launch.op} {launch.name} {capability}: {done / launch.operations:.2f} times its products", flush=True)
    return key, found


def predicted() -> Iterator[tuple[str, StaticPlan]]:
    """A plan for each GPU, model and batch that has counts."""
    for gpu in GPUS:
        for name in MODELS:
            for batch in sorted(BATCHES):
                with suppress(UsageError):  # not counted
                    yield gpu, static_plan(load_config(find_config(name)), load_machine(gpu), batch)


def table(plans: list[tuple[str, StaticPlan]]) -> tuple[list[str], Iterator[list[str]]]:
    """Every kind of launch on the GPUs of `IN_FULL`: the head, and rows."""
    shown = static_columns()

    def rows() -> Iterator[list[str]]:
        for gpu, plan in plans:
            for precision in plan.launches if gpu in IN_FULL else ():
                for row in static_rows(plan, precision):
                    cells = (one.value(row) for one in shown)
                    yield [gpu, plan.model, str(plan.batch), *(_cell(cell) for cell in cells)]

    return ["gpu", "model", "batch", *(one.key for one in shown)], rows()


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def page(plans: list[tuple[str, StaticPlan]]) -> Iterator[str]:
    found = shipped_counts()
    yield f"""# What the CUDA engine's launches should take

`python benchmarks/cuda_static.py` writes this page: **{ESTIMATED}**. Predicted on
{time.strftime("%F")} from the kernels of commit {commit()}, compiled by triton {found.triton}. Nothing had run on a
GPU by then.

A launch takes the least time of a launch in a CUDA graph and, on top, the largest of these bounds, each divided by the
share of it that kernels reach. The shares, with their range, are guesses; the range of an estimate follows from theirs.

| bound | reached | at best | at worst |
|---|---:|---:|---:|
"""
    for name, share in {**REACHED, "launch": LAUNCHING}.items():
        yield f"| {name} | {share.likely:.0%} | {share.best:.0%} | {share.worst:.0%} |\n"
    yield f"""
*memory*: bytes at the bandwidth. *cache*: operands that each program reads anew, from the L2 cache. *products*: tensor
cores, padded tiles included. *issue*: instructions at one a clock of each scheduler; *alu*, *fma*, *special*, *loads*:
the clocks that they hold their units. *chain*: waves of programs, each as long as one warp alone takes in order, every
load a hit in the L2 cache. Loops count as often as they run, branches as not taken. The clock is that of the data
sheet's peaks. GPUs without counts of their own kernels take those of 9.0. [The table](cuda_static.csv) has every kind
of launch on {" and ".join(gpu.upper() for gpu in IN_FULL)}: success on a first GPU is 20 of 25 kinds of Swin-T within
25 %.

## Instructions

| of a thread, on 9.0 | at first | now | wanted |
|---|---:|---:|---:|
"""
    for name, number in (instructions(found) or {}).items():
        first, wanted = AT_FIRST[name]
        yield f"| {name} | {first:.1f} | {number:.1f} | {wanted:g} |\n"
    yield """
*At first*: commit 09dd383d. A logit is one of the padded tile, 64 x 64 for a window of 49 tokens; its instructions are
all of the kernel's.

## Sums

Milliseconds, with their range; each precision with the fusions that are best for it. *Floor*: int8 by bytes, products
and launches alone. *Bound by issue*: the share of int8's time in launches that instructions or their units decide.

| GPU | model | batch | int8 | float8 | float16 | float16 / int8 | floor | bound by issue |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""
    for gpu, plan in plans:
        yield f"| {gpu.upper()} | {plan.model} | {plan.batch} | {' | '.join(sums(plan))} |\n"


def sums(plan: StaticPlan) -> Iterator[str]:
    """The cells of a plan, empty where kernels were not counted."""
    for precision in (INT8, FP8, FP16):
        us, low, high = plan.us(precision) if precision in plan.launches else (0.0, 0.0, 0.0)
        yield f"{us / 1e3:.2f} ({low / 1e3:.2f} to {high / 1e3:.2f})" if us else ""
    int8 = plan.launches.get(INT8, ())
    both = int8 and FP16 in plan.launches
    yield f"{plan.us(FP16)[0] / plan.us(INT8)[0]:.2f}" if both else ""
    yield f"{sum(one.floor.us for one in int8) / 1e3:.2f}" if int8 else ""
    by_issue = sum(one.estimate.us for one in int8 if one.estimate.bound in BY_ISSUE)
    yield f"{by_issue / plan.us(INT8)[0]:.0%}" if int8 else ""


def commit() -> str:
    """The last commit that changed the kernels."""
    command = ["git", "log", "-1", "--format=%h", "--", "swin_quant/backends/cuda/kernels"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
