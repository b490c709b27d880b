"""Choose the fusions of Swin's kernels for GPUs that are not here, and write them into `configs/machines/GPU.yaml`.

    python tools/cuda/fusions.py [GPU ...] [--capability 90] [--batch 1 8 32] [--models NAME ...]

Each kernel that the engine could launch is compiled, its machine code counted, and its time estimated (estimates.py).
For each network and batch the fusions with the least sum are taken; the table says, for a type of operands, a fusion
and a width in channels, from how many tokens on it is taken, left, taken again, and so on. `--capability`: compile for
this one instead of the GPU's own, so that all GPUs share the compiler's work. Nothing is measured; nothing needs a GPU.
"""

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from math import inf, isqrt
from pathlib import Path

from crosscompile import OLDEST_FLOAT8
from estimates import KernelCounts, count_kernel, estimate_us

from swin_quant.backends.cuda.fusions import FUSIONS, Fusion, Row, get_size
from swin_quant.backends.cuda.gpu import Machine, gpus, load_machine
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import Launch, format_shape
from swin_quant.backends.cuda.spec import make_spec_from_config
from swin_quant.base.files import atomic_write_bytes
from swin_quant.config import find_config, load_config

MACHINES = Path(__file__).resolve().parents[2] / "configs" / "machines"
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swinv2_tiny_patch4_window8_256",
    "swinv2_base_patch4_window8_256",
)
PRECISIONS = ("int8", "fp8", "float")
BATCHES = (1, 8, 32)
Programs = Mapping[tuple[str, str, int], Sequence[Launch]]
Counted = Mapping[tuple[str, int], KernelCounts | None]
Table = dict[str, dict[str, dict[str, list[int]]]]


def fitting(launches: Sequence[Launch], at: int) -> list[tuple[Fusion, Sequence[Launch]]]:
    """The fusions that a place of a list of launches allows, and the launches that each would merge."""
    return [(one, launches[at : at + len(one.patterns)]) for one in FUSIONS if one.fits(launches[at:])]


def with_fusions(launches: Sequence[Launch]) -> list[Launch]:
    """These launches, and every launch that some fusion could make of them."""
    return [*launches, *(one.merged(group) for at in range(len(launches)) for one, group in fitting(launches, at))]


def chosen(launches: Sequence[Launch], us: Callable[[Launch], float]) -> list[Row]:
    """The grouping of launches with the least sum of times; of two that are equal, the one with fewer kernels."""
    best: list[tuple[float, list[Row]]] = [(0.0, [])]  # of the launches from a place on, the last place first
    for at in reversed(range(len(launches))):
        choices = [(us(launches[at]) + best[-1][0], None, launches[at : at + 1])]
        for fusion, group in fitting(launches, at):
            choices.append((us(fusion.merged(group)) + best[-len(group)][0], fusion, group))
        least, taken, group = min(reversed(choices), key=lambda choice: choice[0])
        best.append((least, [(taken, group), *best[-len(group)][1]]))
    return best[-1][1]


def list_programs(models: Sequence[str], batches: Sequence[int]) -> Programs:
    """The launches of each network, precision and batch, none fused."""
    configs = {name: load_config(find_config(name)) for name in models}
    return {
        (name, precision, batch): build_program(make_spec_from_config(cfg, precision), batch).launches
        for name, cfg in configs.items()
        for precision in PRECISIONS
        for batch in batches
    }


def count_all(programs: Programs, capability: int) -> Counted:
    """Counts of every launch and fusion, by its shape and batch, compiled by all cores."""
    wanted = {
        (format_shape(one), batch): one
        for (_, precision, batch), launches in programs.items()
        if precision != "fp8" or capability >= OLDEST_FLOAT8
        for one in with_fusions(launches)
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(count_kernel, wanted.values(), [capability] * len(wanted), chunksize=8)
        return dict(zip(wanted, found, strict=True))


def choose_table(programs: Programs, us: Callable[..., float], has_float8: bool = True) -> Table:
    """The fusions with the least sum of microseconds, which `us` gives for a launch and batch: for operands, fusion
    and channels, the tokens at which it is taken, left, and so on. Where blocks of one size differ, as with and without
    a shift, most of them decide."""
    votes: dict[tuple[str, str, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for (_, precision, batch), launches in programs.items():
        if precision == "fp8" and not has_float8:
            continue
        at = 0
        for taken, group in chosen(launches, partial(us, batch=batch)):
            for fusion, merged in fitting(launches, at):
                size = get_size(merged)
                votes[size.operands, fusion.title, size.channels][size.tokens] += 1 if fusion is taken else -1
            at += len(group)
    table: Table = {}
    for (operands, title, channels), by_tokens in sorted(votes.items()):
        table.setdefault(operands, {}).setdefault(title, {})[str(channels)] = changes(by_tokens)
    return table


def changes(votes: Mapping[int, int]) -> list[int]:
    """The numbers of tokens at which a fusion is taken, left, taken, ...: halfway, by factor, between known ones."""
    found: list[int] = []
    before, was = 0, False
    for tokens, vote in sorted(votes.items()):
        if (vote > 0) != was:
            found.append(isqrt(before * tokens))
            was = not was
        before = tokens
    return found


def write_table(path: Path, table: Table, about: str) -> None:
    """Put the fusions into a GPU's file, in place of those that are there."""
    lines = ["  fusions:"]
    for operands, fusions in table.items():
        lines.append(f"    {operands}:")
        for title, widths in fusions.items():
            words = ", ".join(f'"{width}": {widths[width]}' for width in sorted(widths, key=int))
            lines.append(f'      "{title}": {{{words}}}')
    write_section(path, f"Fusions, {about}", lines)


def write_section(path: Path, comment: str, lines: Sequence[str]) -> None:
    """Put lines at the end of a file, below a comment, whose first word says which older ones they replace."""
    start = f"  # {comment.split(',')[0]}"
    parts = re.split(r"(?m)^(?=  # (?:Fusions|Tiles))", path.read_text(encoding="utf-8"))
    kept = "".join(part for part in parts if not part.startswith(start))
    atomic_write_bytes(path, (kept + "\n".join([f"  # {comment}", *lines]) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", metavar="GPU", help="default: every one of configs/machines")
    parser.add_argument("--capability", type=int, help="compile for this one, not the GPU's own")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    programs = list_programs(args.models, args.batch)
    count = cache(partial(count_all, programs))
    for name, machine in {name: load_machine(name) for name in args.gpus or gpus()}.items():
        counted = count(args.capability or machine.gpu.capability)

        def us(launch: Launch, batch: int, machine: Machine = machine, counted: Counted = counted) -> float:
            counts = counted[format_shape(launch), batch]
            return estimate_us(launch, counts, machine) if counts else inf  # where the kernel does not take it

        table = choose_table(programs, us, bool(machine.gpu.fp8_tflops))
        for_one = f" --capability {args.capability}" if args.capability else ""
        about = f"estimated and not measured: `python tools/cuda/fusions.py {name}{for_one}` writes them"
        write_table(MACHINES / f"{name}.yaml", table, about)
        print(MACHINES / f"{name}.yaml", flush=True)


if __name__ == "__main__":
    main()
