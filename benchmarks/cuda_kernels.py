"""Every kernel of the CUDA engine compiled for GPUs that are not here: writes docs/results/cuda_kernels.md.

    python benchmarks/cuda_kernels.py [--models ...] [--half ...] [--ops gemm ...] [--capabilities 80 86 89 90 100 120]

The kernels are those of the launch lists of the models at batch 32, and those that fusions can make of them, each once;
of the models named by --half also in half precision; one kernel takes about a second of CPU for each kind of GPU, and
Triton's cache keeps it. Exit code 1 if one spills, does not fit, or has no int8 products where it must.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from swin_quant.backends.cuda.cases import cases
from swin_quant.backends.cuda.crosscompile import TARGETS, CompiledKernel, KernelCall, cross_compile
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.config import load_config
from swin_quant.config.files import find_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "cuda_kernels.md"
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swinv2_tiny_patch4_window8_256",
    "swinv2_base_patch4_window8_256",
)
HALF = MODELS[:1]
BATCH = 32
SHOWN = (
    "N", "K", "C", "HIDDEN", "KIND", "POST", "SIDE", "WINDOW", "SHIFT", "HEADS", "BM", "BN", "BK", "GROUP", "BC", "BH",
    "BQ", "BKEYS", "ROWS",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--half", nargs="*", default=HALF)
    parser.add_argument("--ops", nargs="+", help="kernels, by their names (default: all)")
    parser.add_argument("--capabilities", type=int, nargs="+", default=TARGETS)
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    named = [call for call in kernels(args.models, args.half) if not args.ops or call.name in args.ops]
    by_kernel = []
    for call in named:
        by_kernel.append([cross_compile(call, capability) for capability in args.capabilities])
        print(f"{len(by_kernel)} of {len(named)}: {title(call)}", file=sys.stderr, flush=True)
    wrong = list(failures(named, by_kernel))
    args.output.write_text("".join(page(named, by_kernel, args, wrong)), encoding="utf-8")
    print(f"{args.output}: {len(named)} kernels for {len(args.capabilities)} kinds of GPU, {len(wrong)} findings")
    sys.exit(bool(wrong))


def kernels(models: Iterable[str], half: Iterable[str]) -> list[KernelCall]:
    """Those of all models, each once; of those that differ in the size of the map or the shift alone, a shifted one."""
    found: dict[str, KernelCall] = {}
    for name, precision in [*((name, "int8") for name in models), *((name, "float") for name in half)]:
        launches = program_of(spec_of_config(load_config(find_config(name)), precision), BATCH).launches
        for call in cases([*launches, *candidates(launches)]):
            kind = without_map(call)
            if kind not in found or dict(call.constants).get("SHIFT"):
                found[kind] = call
    return list(found.values())


def without_map(call: KernelCall) -> str:
    constants = dict(call.constants)
    ignored = {"SIDE", "SHIFT", *(["WINDOW"] if constants.get("WINDOW") == constants.get("SIDE") else [])}
    return str([call.name, call.types, [pair for pair in call.constants if pair[0] not in ignored], call.options])


def failures(named: list[KernelCall], by_kernel: list[list[CompiledKernel]]) -> Iterator[str]:
    """What a kernel must have and has not."""
    for call, made in zip(named, by_kernel, strict=True):
        types = dict(call.types)
        int8 = types.get("w", types.get("qkv")) == "*i8"
        for one in made:
            where = f"{title(call)}, {one.capability}"
            if one.spilled:
                yield f"{where}: spills {one.spilled} bytes"
            if not one.programs:
                yield f"{where}: {one.shared} bytes of shared memory, more than a program may have"
            if int8 and not one.int8:
                yield f"{where}: no int8 tensor-core instructions"
            if one.capability == 90 and "IMMA" in one.mma and dict(call.constants).get("BM", 0) >= 64:
                yield f"{where}: IMMA, not IGMMA"


def title(call: KernelCall) -> str:
    """The kernel and what it is specialised for."""
    constants = dict(call.constants)
    warps = dict(call.options).get("num_warps")
    return f"{call.name} {' '.join(f'{key} {constants[key]}' for key in SHOWN if constants.get(key))}, {warps} warps"


def page(
    named: list[KernelCall], by_kernel: list[list[CompiledKernel]], args: argparse.Namespace, wrong: list[str]
) -> Iterator[str]:
    import triton

    yield (
        "# The kernels of the CUDA engine, compiled\n\n"
        f"Written by `python benchmarks/cuda_kernels.py` with triton {triton.__version__}, without a GPU: "
        f"every kernel {'' if not args.ops else '(' + ', '.join(args.ops) + ') '}"
        f"that {', '.join(args.models)} launch at batch {BATCH} in int8, and {' and '.join(args.half)} in half "
        "precision, with and without fusions. Swin-S has those of T; of kernels that differ in the size of the map or "
        "the shift alone there is one. *Compiled, not run.*\n\nA cell: registers a thread / KB of shared memory / "
        "programs that a multiprocessor holds / matrix instructions in the machine code. IGMMA, HGMMA are Hopper's, of "
        "whole warp groups; IMMA, HMMA of one warp.\n\n"
    )
    checked = "; ".join(wrong) or "no kernel spills, all fit, and every int8 product runs on int8 tensor cores"
    yield f"{len(named)} kernels, {len(named) * len(args.capabilities)} compilations. Found: {checked}.\n\n"
    yield f"| kernel | {' | '.join(f'{c // 10}.{c % 10}' for c in args.capabilities)} |\n"
    yield f"|---|{'---|' * len(args.capabilities)}\n"
    for call, made in zip(named, by_kernel, strict=True):
        yield f"| {title(call)} | {' | '.join(map(cell, made))} |\n"


def cell(one: CompiledKernel) -> str:
    mma = ", ".join(f"{count} {name}" for name, count in one.mma.items()) or "-"
    spilled = f", spills {one.spilled} B" if one.spilled else ""
    return f"{one.registers} / {one.shared / 1024:.0f} / {one.programs} / {mma}{spilled}"


if __name__ == "__main__":
    main()
