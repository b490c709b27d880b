"""What kernels become on a GPU that is not here: Triton's compiler and its own disassembler need none.

Launches are recorded as they are made (`recorded`), so that what is compiled is what runs: the same types, constants,
warps and stages. A recorded launch computes nothing: tensors on the meta device are enough.
"""

import importlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from swin_quant.backends.cuda.kernels.call import settle_cache_keys, without_spills
from swin_quant.base.errors import UsageError

TARGETS = (80, 86, 89, 90, 100, 120)
OLDEST_FLOAT8 = 89
_TYPES = {
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_ALIGNED = 16  # bytes of addresses, and factors of numbers, that the compiler is told of, as the launcher does
_MMA = re.compile(r"\b(I|IG|H|HG|Q|QG|O|UTC[A-Z]*)(?=MMA\b)")
# Of what Triton hands to LLVM: how warps share results of tensor cores, with the part of one of them, and the products.
_LAYOUT = re.compile(r"^(#\w+) = #\S*nvidia_mma<.*warpsPerCTA = \[(\d+), (\d+)\].*instrShape = \[(\d+), (\d+)", re.M)
_PRODUCT = re.compile(r"\b(?:dot|warp_group_dot) .* : \S*?<(\d+)x(\d+)x.* -> tensor<\d+x(\d+)x\w+, (#\w+)>")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has for the programs that are resident on it, by compute capability.

    CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". Every program takes
    `RESERVED` bytes of shared memory more; registers are given to warps in units of 256.
    """

    shared_sm: int
    shared_program: int
    threads: int
    programs: int
    registers: int = 65536


RESERVED = 1024
LIMITS = {
    80: Limits(164 << 10, 163 << 10, 2048, 32),
    86: Limits(100 << 10, 99 << 10, 1536, 16),
    89: Limits(100 << 10, 99 << 10, 1536, 24),
    90: Limits(228 << 10, 227 << 10, 2048, 32),
    100: Limits(228 << 10, 227 << 10, 2048, 32),
    120: Limits(100 << 10, 99 << 10, 1536, 24),
}


@dataclass(frozen=True)
class KernelCall:
    """A launch of a kernel, without its data: types and constants by parameter, options of the compiler."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return str(self.kernel.__name__)

    def __hash__(self) -> int:
        return hash((self.name, self.types, repr(self.constants), self.options))

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process a kernel goes by its name: Triton's are not what pickle finds under theirs."""
        rest = (self.types, self.constants, self.aligned, self.options)
        return _named, (self.kernel.__module__, self.name, *rest)


def _named(module: str, name: str, *rest: Any) -> KernelCall:
    return KernelCall(getattr(importlib.import_module(module), name), *rest)


@dataclass(frozen=True)
class CompiledKernel:
    """What one GPU's compiler made of a call. Bytes; `mma`: matrix instructions of its machine code, by name;
    `repeated`: its products are computed so many times, some warps doing the same; `eased`: it has all registers of a
    thread, since it spills with the compiler's own choice."""

    capability: int
    warps: int
    registers: int
    spilled: int
    shared: int
    mma: Mapping[str, int]
    repeated: float = 1.0
    eased: bool = False

    @property
    def programs(self) -> int:
        """How many run on one multiprocessor at a time; 0: its shared memory does not suffice for one."""
        limits = LIMITS[self.capability]
        if self.shared > limits.shared_program:
            return 0
        of_warp = -(-max(self.registers, 1) * 32 // 256) * 256
        return min(
            limits.registers // (of_warp * self.warps),
            limits.shared_sm // (self.shared + RESERVED),
            limits.threads // (32 * self.warps),
            limits.programs,
        )

    @property
    def int8(self) -> bool:
        """Whether products run in int8 on tensor cores."""
        return bool({"IMMA", "IGMMA", "UTCIMMA"} & self.mma.keys())

    @property
    def float8(self) -> bool:
        """Whether products run in float8 on tensor cores."""
        return bool({"QMMA", "QGMMA", "UTCQMMA"} & self.mma.keys())


@contextmanager
def recorded() -> Iterator[list[KernelCall]]:
    """Inside, Triton's launches are written into the list, each once, and not made."""
    from triton.runtime.jit import JITFunction

    calls: dict[KernelCall, KernelCall] = {}
    found: list[KernelCall] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:
            return
        call = _call(self, args, kwargs)
        if call not in calls:
            calls[call] = call
            found.append(call)

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def _call(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelCall:
    names = {parameter.name for parameter in kernel.params}
    options = {name: value for name, value in kwargs.items() if name not in names}
    bound = kernel.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
    bound.apply_defaults()
    types, constants, aligned = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, bound.arguments[parameter.name]
        types[name], constant = "constexpr", True
        if not parameter.is_constexpr and value is not None and not (type(value) is int and value == 1):
            types[name], constant = _type(value), False
            if isinstance(value, torch.Tensor) or (type(value) is int and value % _ALIGNED == 0):
                aligned.append(name)
        if constant:
            constants[name] = value
    known = tuple((name, options[name]) for name in _OPTIONS if name in options)
    return KernelCall(kernel, tuple(types.items()), tuple(constants.items()), tuple(aligned), known)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def compiled(call: KernelCall, capability: int) -> tuple[Any, Any]:
    """Triton's source and kernel of a call, for a GPU of that compute capability. They are kept in Triton's cache,
    where a launch on such a GPU finds them: `without_spills`, as it is launched there.

    UsageError for float8 on a GPU of before 8.9, which has none.
    """
    if capability < OLDEST_FLOAT8 and "*fp8e4nv" in dict(call.types).values():
        raise UsageError(f"{call.name}: float8 needs compute capability 8.9, not {capability // 10}.{capability % 10}")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    settle_cache_keys()
    places = {name: index for index, (name, _) in enumerate(call.types)}
    source = ASTSource(
        fn=call.kernel,
        signature=dict(call.types),
        constexprs={(places[name],): value for name, value in call.constants},
        attrs=_attributes(call),
    )

    def made(options: Mapping[str, Any]) -> Any:
        return compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))

    return source, made(without_spills(dict(call.options), lambda options: usage(made(options))[1]))


def _attributes(call: KernelCall) -> dict[tuple[int], list[list[Any]]]:
    """As a launch has them, to the order: what is compiled goes by them in the cache. From Triton 3.7 on arguments that
    are known of nothing have theirs too, but for numbers that are float."""
    import triton

    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    known = {name: [["tt.divisibility", _ALIGNED]] for name in call.aligned}
    return {
        (index,): known.get(name, [])
        for index, (name, kind) in enumerate(call.types)
        if name in known or (newer and not kind.startswith(("fp", "bf")))
    }


def cross_compile(call: KernelCall, capability: int) -> CompiledKernel:
    """`compiled`, and its machine code read."""
    _, made = compiled(call, capability)
    registers, spilled = usage(made)
    names = [f"{kind}MMA" for kind in _MMA.findall(_tool("nvdisasm", "-c", made))]
    mma = {name: names.count(name) for name in sorted(set(names))}
    eased = made.metadata.maxnreg is not None and "maxnreg" not in dict(call.options)
    again = repeated(made.asm["ttgir"])
    return CompiledKernel(
        capability, made.metadata.num_warps, registers, spilled, made.metadata.shared, mma, again, eased
    )


def repeated(ttgir: str) -> float:
    """What tensor cores multiply, divided by what there is to multiply, by how Triton shares results out among warps.

    Each product counts once, however often a loop computes it.
    """
    covered = {}
    for layout, down, across, rows, columns in _LAYOUT.findall(ttgir):
        covered[layout] = int(down) * int(rows), int(across) * int(columns)
    done = needed = 0
    for m, k, n, layout in _PRODUCT.findall(ttgir):
        if layout in covered:
            needed += int(m) * int(n) * int(k)
            done += max(int(m), covered[layout][0]) * max(int(n), covered[layout][1]) * int(k)
    return done / needed if needed else 1.0


def usage(made: Any) -> tuple[int, int]:
    """Registers of a thread, and its bytes in memory, of a kernel that Triton has compiled."""
    found = _USAGE.search(_tool("cuobjdump", "-res-usage", made))
    if found is None:
        raise RuntimeError(f"{made.metadata.name}: cuobjdump says nothing of its registers")
    registers, stack, _, local = map(int, found.groups())
    return registers, stack + local


def _tool(name: str, how: str, made: Any) -> str:
    """What one of the tools that come with Triton prints of a kernel's machine code."""
    import triton.backends.nvidia

    place = Path(triton.backends.nvidia.__path__[0], "bin", name)
    with TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        return subprocess.run([place, how, cubin], check=True, capture_output=True, text=True).stdout
