"""Instructions by pipe, registers and shared memory of each launch's compiled kernel, kept in a file.

No GPU is needed to count, and no Triton to look up: a kernel's key has its sources, types, constants and options.
"""

import ast
import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from swin_quant.backends.cuda.crosscompile import compiled, kernel_of, recorded, tool, usage
from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.sass import Counts, counted
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, configs_dir

FILE = "cuda_counts.csv"
_JIT = Path(__file__).parent / "kernels" / "jit"
_PACKAGE = "swin_quant.backends.cuda.kernels.jit"
_ALIGNED = 16


@dataclass(frozen=True)
class KernelCounts:
    """`counts`: of one warp of a program. `registers`: of a thread; `shared`: bytes of a program."""

    counts: Counts
    warps: int
    registers: int
    shared: int


def count(launch: Launch, capability: int, tiles: Tiles | None = None) -> KernelCounts:
    """Compile the launch's kernel for a GPU of this compute capability, and count its machine code. It takes seconds.

    UsageError for float8 on a GPU that has none.
    """
    prepared = kernel_of(launch).prepare(tiles)
    with recorded() as calls:
        prepared.run()
    _, made = compiled(calls[0], capability)
    counts = counted(tool("nvdisasm", "-c", made), trips(prepared), capability)
    return KernelCounts(counts, made.metadata.num_warps, usage(made)[0], made.metadata.shared)


def trips(prepared: PreparedLaunch) -> tuple[int, ...]:
    """How often each loop of the kernel runs, by depth; loops that the compiler unrolls are not in its code."""
    c, name = prepared.constants, prepared.kernel.rpartition(".")[2]
    tiles_of_keys = -(-(c["WINDOW"] ** 2) // c["BKEYS"]) if "BKEYS" in c else 1
    return {
        "gemm": lambda: (-(-c["K"] // c["BK"]),),
        "gemm_norm": lambda: (c["K"] // c["BK"],),
        "norm_gemm": lambda: (c["GROUP"],),
        "mlp": lambda: (c["HIDDEN"] // c["BH"],),
        "attention": lambda: (c["WINDOWS"], tiles_of_keys) if c["WINDOWS"] > 1 else (tiles_of_keys,),
        "attention_norm": lambda: (c["HEADS"], tiles_of_keys),
        "pool": lambda: (-(-c["TOKENS"] // c["ROWS"]),),
    }.get(name, tuple)()


def key_of(prepared: PreparedLaunch, capability: int) -> str:
    """A name for all that decides the counts. Maps of other sizes share it and, without attention, shifts: they change
    an address by a few instructions."""
    constants, attends = dict(prepared.constants), "BKEYS" in prepared.constants
    if "SIDE" in constants:
        side, window, shift = (constants.pop(word, 0) for word in ("SIDE", "WINDOW", "SHIFT"))
        constants |= {"WHOLE": side == window, "SHIFTED": attends and shift > 0, "WINDOW": window if attends else 0}
    types = {word: _type(value) for word, value in prepared.arguments.items()}
    what = [prepared.kernel, types, constants, {**prepared.tiles.options(), **prepared.options}, capability]
    return hashlib.sha256(f"{_source(*prepared.kernel.split('.'))} {what}".encode()).hexdigest()[:16]


def _type(value: Any) -> str:
    """As Triton's compiler distinguishes arguments."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, int):
        return "1" if value == 1 else f"int {value % _ALIGNED == 0}"
    return "number" if value is not None else "none"


@cache
def _source(module: str, name: str) -> str:
    """SHA-256 of a function or constant of `kernels/jit` and of those that it names; comments and docstrings do not
    count."""
    found, imported = _module(module)
    node = found[name]
    words = sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {name})
    inner = [_source(module, word) for word in words if word in found]
    inner += [_source(imported[word], word) for word in words if word in imported]
    body = [one for one in getattr(node, "body", [node]) if not _is_text(one)]
    whole = [ast.dump(one) for one in (getattr(node, "args", None), *body) if one is not None]
    return hashlib.sha256(f"{whole} {inner}".encode()).hexdigest()


@cache
def _module(module: str) -> tuple[Mapping[str, ast.stmt], Mapping[str, str]]:
    """A module's functions and constants by name, and its names that are of another module of `kernels/jit`."""
    found: dict[str, ast.stmt] = {}
    imported: dict[str, str] = {}
    for node in ast.parse((_JIT / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            imported |= {one.name: str(node.module).rpartition(".")[2] for one in node.names}
    return found, imported


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@dataclass(frozen=True)
class CountsFile:
    """Counts by key, all of one compiler."""

    triton: str
    known: Mapping[str, KernelCounts]

    def of(self, launch: Launch, capability: int) -> KernelCounts | None:
        """The counts of the launch with its default tiles; None if they are not at hand, or for other kernels, or if
        the network is too narrow for the kernel."""
        try:
            prepared = kernel_of(launch).prepare()
        except SwinQuantError:
            return None
        return self.known.get(key_of(prepared, capability))


_NUMBERS = [*(field.name for field in fields(Counts)), "warps", "registers", "shared"]


@cache
def shipped_counts() -> CountsFile:
    """The counts that come with the package; `benchmarks/cuda_static.py` writes them."""
    return read_counts(configs_dir() / FILE)


def read_counts(file: Path) -> CountsFile:
    """A file of counts; an empty one if there is none. SwinQuantError if it is damaged."""
    if not file.is_file():
        return CountsFile("", {})
    head, _, table = file.read_text(encoding="utf-8").partition("\n")
    known = {}
    try:
        for row in csv.DictReader(io.StringIO(table)):
            numbers = {word: float(row[word]) for word in _NUMBERS}
            warps, registers, shared = (int(numbers.pop(word)) for word in ("warps", "registers", "shared"))
            known[row["key"]] = KernelCounts(Counts(**numbers), warps, registers, shared)
    except (KeyError, TypeError, ValueError) as error:
        raise SwinQuantError(f"{file}: is no file of counts ({error}): write it again") from error
    return CountsFile(head.removeprefix("# triton "), known)


def write_counts(file: Path, counts: CountsFile) -> None:
    """Write the file whole, or not at all; rows by key, so that a change of one kernel changes its rows alone."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["key", *_NUMBERS])
    for key, one in sorted(counts.known.items()):
        numbers = {**asdict(one.counts), "warps": one.warps, "registers": one.registers, "shared": one.shared}
        rows.writerow([key, *(f"{numbers[word]:.0f}" for word in _NUMBERS)])
    atomic_write_bytes(file, f"# triton {counts.triton}\n{out.getvalue()}".encode())
