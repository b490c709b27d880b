"""Estimate a launch's time on a GPU from its compiled kernel, without the GPU.

Each bound is a time that the launch needs of one resource, were nothing else in the way. Kernels reach a share of each,
`REACHED`: guesses, since nothing was measured. A launch takes the largest of the times so corrected, and the launch
itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import nan, prod
from typing import Any

from crosscompile import KernelCall, compiled, recorded, tool, usage
from sass import INT8_A_CLOCK, SCHEDULERS, Counts, counted

from swin_quant.backends.cuda.kernels.call import PreparedLaunch
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.machines import Machine
from swin_quant.backends.cuda.program import Launch, make_kernel

FROM_CACHE = 64  # bytes a clock from the L2 cache into one multiprocessor (V100: Jia et al., 2018)
RESERVED = 1024  # bytes of shared memory that every program takes besides its own
# Cycles an instruction of a warp alone, waiting for its operands: the median over 2,334 kernels, each simulated
# with its latencies by an earlier form of this tool (2.7 to 10.6 for nine in ten).
ALONE = 4.4
REACHED: Mapping[str, float] = {
    "memory": 0.8,  # bytes at the GPU's bandwidth
    "cache": 0.7,  # operands that each program reads anew, from the L2 cache
    "products": 0.6,  # tensor cores, products of padded tiles included
    "issue": 0.65,  # instructions at one a clock of each scheduler
    "alu": 0.85,  # integer, compare and convert units
    "fma": 0.85,  # float units
    "special": 0.85,  # powers, roots, conversions between integers and floats
    "loads": 0.85,  # loads, stores and shuffles
    "chain": 1.0,  # waves, each as long as one warp alone
}


@dataclass(frozen=True)
class KernelCounts:
    """`counts`: of one warp of a program. `registers`: of a thread; `shared`: bytes of a program."""

    counts: Counts
    warps: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Estimate:
    """`bounds`: microseconds by the names in `REACHED`, before shares. `us`: the estimate."""

    bounds: Mapping[str, float]
    us: float

    @property
    def bound(self) -> str:
        """The bound that decides."""
        return max(self.bounds, key=lambda name: self.bounds[name] / REACHED[name])


def count(launch: Launch, capability: int, tiles: Tiles | None = None) -> KernelCounts:
    """Compile the launch's kernel for a GPU of this compute capability, and count its machine code. It takes seconds,
    unless Triton's cache has the kernel.

    UsageError for float8 on a GPU that has none.
    """
    prepared = make_kernel(launch).prepare(tiles)
    with recorded() as calls:
        prepared.run()
    return _counts(calls[0], trips(prepared), capability)


@cache
def _counts(call: KernelCall, loops: tuple[int, ...], capability: int) -> KernelCounts:
    made = compiled(call, capability)[1]
    counts = counted(tool("nvdisasm", "-c", made), loops, capability)
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


def estimate_of(launch: Launch, counts: KernelCounts, machine: Machine) -> Estimate:
    """The estimate for a launch with its default tiles, and the counts of its kernel."""
    gpu, prepared = machine.gpu, make_kernel(launch).prepare()
    programs, clock = prod(prepared.grid), clock_ghz(machine) * 1e3  # clocks a microsecond
    each = -(-programs // gpu.sms)  # on the busiest multiprocessor
    resident = max(1, min(each, resident_programs(gpu.capability, counts.warps, counts.registers, counts.shared)))
    waves, warps, c = -(-each // resident), max(1.0, each * counts.warps / SCHEDULERS), counts.counts
    bounds = {
        "memory": launch.bytes_moved / (machine.bandwidth_gbs * 1e3),
        "cache": each * read_by_program(launch, prepared.constants) / FROM_CACHE / clock,
        "products": max(1e6 * launch.operations / peak(launch, machine), warps * c.tensor / clock),
        "issue": warps * c.issue / clock,
        "alu": warps * c.alu / clock,
        "fma": warps * c.fma / clock,
        "special": warps * c.special / clock,
        "loads": warps * c.memory / clock,
        "chain": waves * c.issue * ALONE / clock,
    }
    us = gpu.launch_us + max(time / REACHED[name] for name, time in bounds.items())
    return Estimate(bounds, us)


def floor_us(launch: Launch, machine: Machine) -> float:
    """The least time of a launch by the GPU's data sheet: the longest of its bytes at the bandwidth, its products at
    the peak, and a launch inside a CUDA graph."""
    memory = launch.bytes_moved / (machine.bandwidth_gbs * 1e3)
    return max(memory, 1e6 * launch.operations / peak(launch, machine), machine.gpu.launch_us)


def peak(launch: Launch, machine: Machine) -> float:
    """Operations a second. Float32 products, the head's alone, get the peak of half precision."""
    if launch.products not in ("int8", "fp8"):
        return machine.float_tflops * 1e12
    return (machine.int8_tops if launch.products == "int8" else machine.gpu.fp8_tflops or nan) * 1e12


def read_by_program(launch: Launch, constants: Mapping[str, Any]) -> float:
    """Bytes of weights that each program reads; of a product alone also of its rows."""
    weights = sum(launch.operands[word].nbytes for word in ("w", "w1") if word in launch.operands)
    if launch.op == "gemm":
        a = launch.operands["a"]
        return (constants["BM"] + constants["BN"]) * constants["K"] * a.dtype.itemsize
    groups = -(-constants["N"] // constants["BN"]) // constants["GROUP"] if "GROUP" in constants else 1
    return weights / groups  # programs of other groups read the other columns


def clock_ghz(machine: Machine) -> float:
    """The clock at which the GPU's tensor cores have the peak of its data sheet."""
    gpu = machine.gpu
    return machine.int8_tops * 1e3 / (gpu.sms * INT8_A_CLOCK[gpu.capability])


@dataclass(frozen=True)
class Limits:
    """A multiprocessor's limits for resident programs.

    CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". Warps get registers in units of
    256.
    """

    shared_sm: int
    shared_program: int
    threads: int
    programs: int
    registers: int = 65536


LIMITS = {
    80: Limits(164 << 10, 163 << 10, 2048, 32),
    86: Limits(100 << 10, 99 << 10, 1536, 16),
    89: Limits(100 << 10, 99 << 10, 1536, 24),
    90: Limits(228 << 10, 227 << 10, 2048, 32),
    100: Limits(228 << 10, 227 << 10, 2048, 32),
    120: Limits(100 << 10, 99 << 10, 1536, 24),
}
"""By compute capability."""


def resident_programs(capability: int, warps: int, registers: int, shared: int) -> int:
    """The number of programs that run on one multiprocessor at a time; 0 if its shared memory does not suffice for one.

    `registers`: of a thread; `shared`: bytes of a program.
    """
    limits = LIMITS[capability]
    if shared > limits.shared_program:
        return 0
    of_warp = -(-max(registers, 1) * 32 // 256) * 256
    return min(
        limits.registers // (of_warp * warps),
        limits.shared_sm // (shared + RESERVED),
        limits.threads // (32 * warps),
        limits.programs,
    )
