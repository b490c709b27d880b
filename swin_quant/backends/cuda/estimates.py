"""Estimate a launch's time on a GPU from its compiled kernel, without the GPU: the largest of its bounds, and a range.

Each bound is a time that the launch needs of one resource, were nothing else in the way. Kernels reach a share of each,
by `REACHED`: a guess with its range, since nothing was measured. A launch takes the largest of the times so corrected,
and the launch itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from swin_quant.backends.cuda.counts import CountsFile, KernelCounts, shipped_counts
from swin_quant.backends.cuda.crosscompile import kernel_of
from swin_quant.backends.cuda.floors import floor_of, gpu_of
from swin_quant.backends.cuda.program import Launch
from swin_quant.backends.cuda.sass import INT8_A_CLOCK, SCHEDULERS
from swin_quant.operators.roofline import Machine

FROM_CACHE = 64  # bytes a clock from the L2 cache into one multiprocessor (V100: Jia et al., 2018)
STAND_IN = 90  # the compute capability whose counts serve where a GPU's own are not at hand
RESERVED = 1024  # bytes of shared memory that every program takes besides its own


@dataclass(frozen=True)
class Reached:
    """The share of a bound that kernels reach: at best, as estimated, and at worst."""

    best: float
    likely: float
    worst: float


REACHED: Mapping[str, Reached] = {
    "memory": Reached(0.9, 0.8, 0.65),  # bytes at the GPU's bandwidth
    "cache": Reached(0.9, 0.7, 0.5),  # operands that each program reads anew, from the L2 cache
    "products": Reached(0.8, 0.6, 0.4),  # tensor cores, products of padded tiles included
    "issue": Reached(0.75, 0.65, 0.5),  # instructions at one a clock of each scheduler
    "alu": Reached(0.95, 0.85, 0.7),  # integer, compare and convert units
    "fma": Reached(0.95, 0.85, 0.7),  # float units
    "special": Reached(0.95, 0.85, 0.7),  # powers, roots, conversions between integers and floats
    "loads": Reached(0.95, 0.85, 0.6),  # loads, stores and shuffles
    "chain": Reached(1.1, 1.0, 0.75),  # waves, each as long as one warp alone
}
LAUNCHING = Reached(1.25, 1.0, 0.67)  # of the least time of a launch in a CUDA graph, which comes on top


@dataclass(frozen=True)
class Estimate:
    """`bounds`: microseconds by the names in `REACHED`, before shares. `us`: the estimate; `low`, `high`: its range.

    `programs` in all, `resident` on a multiprocessor at a time, and `waves` of them.
    """

    bounds: Mapping[str, float]
    us: float
    low: float
    high: float
    programs: int
    resident: int
    waves: int

    @property
    def bound(self) -> str:
        """The bound that decides."""
        return max(self.bounds, key=lambda name: self.bounds[name] / REACHED[name].likely)


def counts_of(
    launches: Iterable[Launch], machine: Machine, file: CountsFile | None = None
) -> dict[str, KernelCounts] | None:
    """Counts by the launch's name, for this GPU's compute capability or for `STAND_IN`; None unless all of one are at
    hand."""
    found, known = list(launches), file or shipped_counts()
    for capability in dict.fromkeys((gpu_of(machine).capability, STAND_IN)):
        counts: dict[str, KernelCounts] = {}
        for launch in found:
            if (one := known.of(launch, capability)) is None:
                break
            counts[launch.name] = one
        else:
            return counts
    return None


def estimate_of(launch: Launch, counts: KernelCounts, machine: Machine) -> Estimate:
    """The estimate for a launch with its default tiles, and the counts of its kernel."""
    gpu, prepared, floor = gpu_of(machine), kernel_of(launch).prepare(), floor_of([launch], machine)
    programs, clock = prod(prepared.grid), clock_ghz(machine) * 1e3  # clocks a microsecond
    each = -(-programs // gpu.sms)  # on the busiest multiprocessor
    capability = gpu.capability if gpu.capability in INT8_A_CLOCK else STAND_IN
    resident = max(1, min(each, resident_programs(capability, counts.warps, counts.registers, counts.shared)))
    waves, warps, c = -(-each // resident), max(1.0, each * counts.warps / SCHEDULERS), counts.counts
    bounds = {
        "memory": floor.memory_us,
        "cache": each * read_by_program(launch, prepared.constants) / FROM_CACHE / clock,
        "products": max(floor.compute_us, warps * c.tensor / clock),
        "issue": warps * c.issue / clock,
        "alu": warps * c.alu / clock,
        "fma": warps * c.fma / clock,
        "special": warps * c.special / clock,
        "loads": warps * c.memory / clock,
        "chain": waves * c.serial / clock,
    }
    us, low, high = (_reached(bounds, gpu.launch_us, share) for share in ("likely", "best", "worst"))
    return Estimate(bounds, us, low, high, programs, resident, waves)


def _reached(bounds: Mapping[str, float], launch_us: float, share: str) -> float:
    longest = max(time / getattr(REACHED[name], share) for name, time in bounds.items())
    return float(launch_us / getattr(LAUNCHING, share) + longest)


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
    gpu = gpu_of(machine)
    return machine.int8_tops * 1e3 / (gpu.sms * INT8_A_CLOCK.get(gpu.capability, INT8_A_CLOCK[STAND_IN]))


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
