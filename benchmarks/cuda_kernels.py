"""Every kernel of the CUDA engine compiled for GPUs that are not here: writes docs/results/cuda_kernels.md and .csv.

    python benchmarks/cuda_kernels.py [--batch ...] [--models ...] [--attention ...] [--half ...] [--float8 ...]
        [--bfloat16 ...] [--ft ...] [--ops gemm ...] [--workers N]

The kernels are those in the launch lists of the models at batch 32 and 1, and those that fusions can make of them, each
once. The models of --half and --float8 are also compiled in those types; those of --bfloat16 in int8 with such a stream
and wholly in that type; those of --ft in FasterTransformer's arithmetic; of those of --attention, whose windows are
wider, only the attention. One kernel takes about a second of CPU for each kind of GPU; --workers share them. The file
--kept holds the results for these sources and this compiler, so that a stopped run goes on. Exit code 1 if a kernel
spills, does not fit, lacks products on its type's tensor cores, or if its warps compute the same.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from cuda_tools import OLDEST_FLOAT8, KernelCall, kernels_of
from pages import RESULTS, ROOT, read_table, script_parser, write_table

from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.kernels.call import settle_cache_keys
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.spec import NetworkSpec, spec_of_config
from swin_quant.base.files import read_json, sha256_of_data, write_json
from swin_quant.config import load_config
from swin_quant.config.load import find_config

sys.path.insert(0, str(ROOT))
from tests.helpers.compiled_kernels import TARGETS, CompiledKernel, cross_compile, kernel_faults  # noqa: E402

PAGE = RESULTS / "cuda_kernels.md"
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swinv2_tiny_patch4_window8_256",
    "swinv2_base_patch4_window8_256",
    "swinv2_large_patch4_window12to24_192to384_22kto1k_ft",
)
WIDER = (
    "swin_base_patch4_window12_384_finetune",
    "swin_large_patch4_window12_384_22kto1k_finetune",
    "swinv2_tiny_patch4_window16_256",
    "swinv2_base_patch4_window16_256",
    "swinv2_base_patch4_window12to24_192to384_22kto1k_ft",
)
HALF = *MODELS[:2], *MODELS[3:5]
FLOAT8 = MODELS
OTHERS = MODELS[:1]  # also with bfloat16 and FasterTransformer's arithmetic
TITLES = {
    "int8": "int8", "float": "half precision", "fp8": "float8", "bfloat16": "int8 with a bfloat16 stream",
    "float-bfloat16": "bfloat16",
    "ft-mode1": "FasterTransformer's mode 1", "ft-mode2": "FasterTransformer's mode 2",
}  # fmt: skip
BATCHES = 32, 1  # small batches take other tiles
SAVED = 50  # compilations between writes
SHOWN = (
    "N", "K", "C", "HIDDEN", "KIND", "POST", "SIDE", "WINDOW", "SHIFT", "HEADS", "BM", "BN", "BK", "GROUP", "BC", "BH",
    "BQ", "BKEYS", "ROWS",
)  # fmt: skip

TOLD = ("registers", "shared KB", "programs", "products", "note")  # of each compilation

Row = tuple[str, KernelCall, list[CompiledKernel | None]]
"""Precision, kernel, and what was made of it for each kind of GPU."""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--attention", nargs="*", default=WIDER)
    parser.add_argument("--half", nargs="*", default=HALF)
    parser.add_argument("--float8", nargs="*", default=FLOAT8)
    parser.add_argument("--bfloat16", nargs="*", default=OTHERS)
    parser.add_argument("--ft", nargs="*", default=OTHERS)
    parser.add_argument("--ops", nargs="+", help="kernels, by their names (default: all)")
    parser.add_argument("--capabilities", type=int, nargs="+", default=TARGETS)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--workers", type=int, default=2, help="processes that compile (default 2)")
    parser.add_argument("--kept", type=Path, default=Path("out/cuda_kernels.json"), help="what was found already")
    args = parser.parse_args()
    found = kernels(of_kinds(args), args.attention, args.batch)
    named = [one for one in found if not args.ops or one[1].name in args.ops]
    kept = Kept(args.kept)
    kept.compile([call for _, call in named], args.capabilities, args.workers)
    rows = [
        (precision, call, [kept.get(call, capability) for capability in args.capabilities]) for precision, call in named
    ]
    wrong = list(failures(rows))
    table = args.output.with_suffix(".csv")
    head, *lines = data(rows, args.capabilities)
    write_table(table, head, lines)
    args.output.write_text("".join(page(read_table(table), args, wrong)), encoding="utf-8")
    print(f"{args.output}: {len(named)} kernels for {len(args.capabilities)} kinds of GPU, {len(wrong)} findings")
    sys.exit(bool(wrong))


def of_kinds(args: argparse.Namespace) -> dict[str, list[str]]:
    """The models that are compiled whole, by arithmetic."""
    kinds = {"int8": args.models, "float": args.half, "fp8": args.float8}
    kinds |= {"bfloat16": args.bfloat16, "float-bfloat16": args.bfloat16}
    return kinds | {"ft-mode1": args.ft, "ft-mode2": [name for name in args.ft if not name.startswith("swinv2")]}


def spec_of_kind(name: str, kind: str) -> NetworkSpec:
    """The spec of a model in one arithmetic."""
    precision = kind.removesuffix("-bfloat16")
    spec = spec_of_config(load_config(find_config(name)), precision if precision in ("float", "fp8") else "int8")
    if kind.startswith("ft"):
        return replace(spec, arithmetic=kind, quantized=frozenset(spec.products()))
    return replace(spec, float_type="bfloat16") if kind.endswith("bfloat16") else spec


def kernels(
    kinds: Mapping[str, Iterable[str]], attention: Iterable[str] = (), batches: Iterable[int] = BATCHES
) -> list[tuple[str, KernelCall]]:
    """The kernels of all models, each once, with its arithmetic.

    If kernels differ only in the size of the map, or in a shift without attention, one of them is taken, a shifted one
    if there is one. `attention`: models of which only attention is taken.
    """
    found: dict[str, tuple[str, KernelCall]] = {}
    whole = [(kind, name, "") for kind, names in kinds.items() for name in names]
    for precision, name, ops in (*whole, *(("int8", name, "attention") for name in attention)):
        spec = spec_of_kind(name, precision)
        for launches in (program_of(spec, batch).launches for batch in batches):
            for call in kernels_of([one for one in (*launches, *candidates(launches)) if one.op.startswith(ops)]):
                kind = without_map(call)
                if kind not in found:
                    found[kind] = precision, call
                elif dict(call.constants).get("SHIFT"):
                    found[kind] = found[kind][0], call
    return list(found.values())


class Kept:
    """Results by kernel, in a file. The key has the sources (called functions too), types, constants, options, compiler
    and GPU."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, dict] = read_json(file, "what kernels became") if file.exists() else {}

    def compile(self, calls: Sequence[KernelCall], capabilities: Sequence[int], workers: int) -> None:
        """Compile missing kernels in some processes, and write the file meanwhile."""
        made = [(call, capability) for call in calls for capability in capabilities if is_there(call, capability)]
        todo = [one for one in made if key_of(*one) not in self.found]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for number, (key, found) in enumerate(pool.imap(compiled, todo), 1):
                self.found[key] = found
                if number % SAVED == 0 or number == len(todo):
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    write_json(self.file, self.found)
                    print(f"{number} of {len(todo)} compilations", file=sys.stderr, flush=True)

    def get(self, call: KernelCall, capability: int) -> CompiledKernel | None:
        """The result; None for float8 on a GPU without it."""
        return CompiledKernel(**self.found[key_of(call, capability)]) if is_there(call, capability) else None


def compiled(one: tuple[KernelCall, int]) -> tuple[str, dict]:
    """The key of a kernel on a GPU, and its result."""
    return key_of(*one), asdict(cross_compile(*one))


def key_of(call: KernelCall, capability: int) -> str:
    import triton

    settle_cache_keys()
    what = [call.name, call.types, call.constants, call.aligned, call.options]
    known = [field.name for field in fields(CompiledKernel)]
    return sha256_of_data([call.kernel.cache_key, triton.__version__, capability, known, repr(what)])


def is_there(call: KernelCall, capability: int) -> bool:
    """Whether the GPU has the kernel's types: older ones have no float8."""
    return capability >= OLDEST_FLOAT8 or not is_float8(call)


def is_float8(call: KernelCall) -> bool:
    return "*fp8e4nv" in dict(call.types).values()


def without_map(call: KernelCall) -> str:
    """A kernel without the addresses of its rows. Attention depends on the shift, by its mask, and on the window."""
    constants = dict(call.constants)
    attends, whole = "HEADS" in constants, constants.get("WINDOW") == constants.get("SIDE")
    ignored = {"SIDE", "SHIFT", *(["WINDOW"] if whole and not attends else [])}
    what = [call.name, call.types, [pair for pair in call.constants if pair[0] not in ignored], call.options]
    return str([*what, attends and bool(constants["SHIFT"])])


def failures(rows: list[Row]) -> Iterator[str]:
    """The requirements that a kernel does not meet."""
    for _, call, compiled in rows:
        for one in filter(None, compiled):
            yield from (f"{title(call)}, {one.capability}: {found}" for found in kernel_faults(call, one))


def title(call: KernelCall) -> str:
    """The kernel and its constants."""
    constants = dict(call.constants)
    warps = dict(call.options).get("num_warps")
    return f"{call.name} {' '.join(f'{key} {constants[key]}' for key in SHOWN if constants.get(key))}, {warps} warps"


def data(rows: list[Row], capabilities: Sequence[int]) -> Iterator[list[str]]:
    """The table: a row for each kernel, five columns for each kind of GPU, empty where it has no float8."""
    yield [
        "precision",
        "kernel",
        "shape",
        "warps",
        *(f"{c // 10}.{c % 10} {what}" for c in capabilities for what in TOLD),
    ]
    for precision, call, compiled in rows:
        name, _, shape = title(call).rpartition(", ")[0].partition(" ")
        cells = [cell for one in compiled for cell in told(one)]
        yield [TITLES[precision], name, shape, str(dict(call.options).get("num_warps")), *cells]


def told(one: CompiledKernel | None) -> list[str]:
    """The cells of the table for one compilation, in the order of TOLD."""
    if one is None:
        return [""] * len(TOLD)
    products = ", ".join(f"{count} {name}" for name, count in one.mma.items())
    note = ", ".join(["all registers"] * one.eased + [f"spills {one.spilled} B"] * bool(one.spilled))
    return [str(one.registers), f"{one.shared / 1024:.0f}", str(one.programs), products, note]


def page(table: Sequence[Mapping[str, str]], args: argparse.Namespace, wrong: list[str]) -> Iterator[str]:
    """The page: the kernels compiled, the findings, and the extremes by kind of kernel."""
    import triton

    named = {TITLES[kind]: models for kind, models in of_kinds(args).items() if models}
    if args.attention:
        named["attention in int8"] = args.attention
    made = [(row, one) for row in table for one in compilations(row)]
    well = "no kernel spills, all fit, every product runs on tensor cores of its type, and once"
    only = f" Kernels {', '.join(args.ops)} only." if args.ops else ""
    yield (
        "# The kernels of the CUDA engine, compiled\n\n"
        f"**{len(table)} kernels, {len(made)} compilations: {'; '.join(wrong) or well}.** Compiled, not run: by triton "
        f"{triton.__version__}, without a GPU, for compute capabilities "
        f"{', '.join(f'{c // 10}.{c % 10}' for c in args.capabilities)}.{only} [{args.output.stem}.csv]"
        f"({args.output.stem}.csv) has every compilation; `python benchmarks/cuda_kernels.py` writes both.\n\n"
        f"## Compiled\n\nEvery kernel that these models launch at batch {' or '.join(map(str, args.batch))}, with and "
        "without fusions:\n\n| in | models |\n|---|---|\n"
    )
    yield from (f"| {kind} | {', '.join(models)} |\n" for kind, models in named.items())
    yield (
        "\nSwin-S has the kernels of Swin-T. Kernels that differ only in the size of the map, or in the shift without "
        "attention, count once. Other types of larger models, and other batches, of which some kernels have other "
        "tiles, were left out.\n\n## Extremes\n\n"
        "Over all compilations: registers of a thread, KB of shared memory, programs that a multiprocessor holds at a "
        "time, and how many compilations hold a single one. *All registers*: the compiler's own choice spills, so the "
        "kernel is compiled with all that a thread can have.\n\n"
    )
    yield from extremes("kernel", made)
    yield "\n"
    yield from extremes("precision", made)
    yield (
        "\nThe table's *products* count matrix instructions in the machine code. IGMMA, HGMMA and QGMMA are Hopper's, "
        "of whole warp groups; IMMA, HMMA and QMMA of one warp. 9.0 and 10.0 have no QMMA: tiles of fewer than 64 rows "
        "multiply float8 as half precision there.\n"
    )


def compilations(row: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A row's cells by TOLD, for each kind of GPU that has the kernel."""
    for key, value in row.items():
        if value and key.endswith(" registers"):
            gpu = key.partition(" ")[0]
            yield {what: row[f"{gpu} {what}"] for what in TOLD}


def extremes(kind: str, made: Sequence[tuple[Mapping[str, str], Mapping[str, str]]]) -> Iterator[str]:
    """A row for each value of that column: the least and the most of its compilations."""
    yield f"| {kind} | compilations | registers | shared KB | programs | single | all registers |\n"
    yield "|---|---:|---:|---:|---:|---:|---:|\n"
    for name in dict.fromkeys(row[kind] for row, _ in made):
        some = [one for row, one in made if row[kind] == name]
        numbers = ([int(one[what]) for one in some] for what in TOLD[:3])
        spans = " | ".join(f"{min(of)} to {max(of)}" for of in numbers)
        single = sum(one["programs"] == "1" for one in some)
        eased = sum("all registers" in one["note"] for one in some)
        yield f"| {name} | {len(some)} | {spans} | {single} | {eased} |\n"


if __name__ == "__main__":
    main()
