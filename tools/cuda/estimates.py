"""Estimate a launch's time on a GPU from its compiled kernel's machine code (SASS), without the GPU.

Instructions are counted by the pipe of a scheduler that they hold, with loops times their trips: every instruction in
front of the last `EXIT` counts as executed, branches forward as not taken. Each bound is a time that the launch needs
of one resource, were nothing else in the way. Kernels reach a share of each, `REACHED`: guesses, since nothing was
measured. A launch takes the largest of the times so corrected, and the launch itself.

Pipes and rates: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions", and Nsight Compute's
description of the pipes (conversions between integers and floats run beside MUFU).
The share of a single warp: Luo et al., "Dissecting the NVIDIA Hopper Architecture through Microbenchmarking", 2025.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod

from crosscompile import compiled, recorded, tool, usage

from swin_quant.backends.cuda.gpu import Machine
from swin_quant.backends.cuda.kernels.kernel import PreparedLaunch
from swin_quant.backends.cuda.program import Launch, make_kernel
from swin_quant.base.errors import SwinQuantError

SCHEDULERS = 4  # of a multiprocessor; a warp stays with one of them
OLDEST_WIDE = 86  # compute capability from which a scheduler has 32 float lanes; 8.0 has 16
# int8 operations a clock of a multiprocessor's tensor cores: data sheets' peaks over multiprocessors and clocks.
INT8_A_CLOCK = {80: 4096, 86: 2048, 89: 2048, 90: 8192, 100: 16384, 120: 2048}
WARP_ALONE = 0.62  # share of Hopper's peak that instructions of one warp reach (Luo et al.)
FROM_CACHE = 64  # bytes a clock from the L2 cache into one multiprocessor (V100: Jia et al., 2018)
RESERVED = 1024  # bytes of shared memory that every program takes besides its own
# By compute capability: bytes of shared memory of a multiprocessor, and the most threads and programs that it has at a
# time (CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability").
LIMITS = {
    80: (164 << 10, 2048, 32), 86: (100 << 10, 1536, 16), 89: (100 << 10, 1536, 24), 90: (228 << 10, 2048, 32),
    100: (228 << 10, 2048, 32), 120: (100 << 10, 1536, 24),
}  # fmt: skip
REGISTERS = 65536  # of a multiprocessor; warps get them in units of 256
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
# By name of an instruction: its pipe, and the cycles for which it holds it; others are vector integers, of `alu`.
_PIPES = {
    name: (pipe, cycles)
    for pipe, cycles, names in (
        ("fma", 1, "FADD FMUL FFMA FFMA2 HFMA2 HADD2 HMUL2 FSWZADD"),
        ("fma", 2, "IMAD IMUL FMUL32I FADD32I FFMA32I"),  # on half of the float lanes
        ("special", 8, "MUFU I2F F2I F2F FRND I2I POPC FLO"),
        ("memory", 4, "LD LDG LDL LDS LDSM LDGSTS ST STG STL STS STSM SHFL ATOM RED"),  # 128 bytes a clock for all
        ("", 0, "BRA EXIT BAR BSSY BSYNC CALL RET WARPGROUP WARPSYNC DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR CCTL "),
        ("", 0, "NANOSLEEP YIELD S2R S2UR R2UR LDC LDCU ULDC UMOV"),
    )
    for name in names.split()
}
_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)((?:\.\w+)*)\s*([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SIDES = re.compile(r"\.(\d+)x(\d+)x(\d+)\b|\.(16)(8)(8|16|32|64)\b")


@dataclass(frozen=True)
class KernelCounts:
    """`cycles`: of one warp, by pipe (see `count_code`). `registers`: of a thread; `shared`: bytes of a program."""

    cycles: Mapping[str, float]
    warps: int
    registers: int
    shared: int


def count_kernel(launch: Launch, capability: int) -> KernelCounts | None:
    """Compile the launch's kernel for a GPU of this compute capability, and count its machine code. It takes seconds,
    unless Triton's cache has the kernel. None for a network that is narrower than the kernel's tiles.

    UsageError for float8 on a GPU that has none.
    """
    try:
        prepared = make_kernel(launch).prepare()
    except SwinQuantError:
        return None
    with recorded() as calls:
        prepared.run()
    made = compiled(calls[0], capability)[1]
    cycles = count_code(tool("nvdisasm", "-c", made), count_trips(prepared), capability)
    return KernelCounts(cycles, made.metadata.num_warps, usage(made)[0], made.metadata.shared)


def count_code(sass: str, trips: Sequence[int], capability: int) -> Counter[str]:
    """Cycles of a scheduler that one warp's instructions take, by pipe: `alu`, `fma`, `special`, `memory` (loads,
    stores, shuffles), `tensor`; and the number of instructions, `issue`.

    `sass`: the code of `nvdisasm -c`. `trips` of its loops by depth, the outermost first; a deeper loop runs once.
    """
    code: list[tuple[str, str, str]] = []  # name before the first dot, the rest of it, and the operands
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif (found := _LINE.match(line)) and found[2] != "NOP":
            guard, *instruction = found.groups()
            code.append((*instruction,))
            if instruction[0] == "EXIT" and not guard:
                break
    loops = []
    for at, (name, _, operands) in enumerate(code):
        if name == "BRA" and (to := _TARGET.search(operands)) and labels.get(to[1], at + 1) < at:
            loops.append((labels[to[1]], at))
    times = [1] * len(code)
    for first, last in loops:
        depth = sum(a <= first and last <= b for a, b in loops) - 1
        for at in range(first, last + 1):
            times[at] *= trips[depth] if depth < len(trips) else 1
    cycles = Counter({"issue": sum(times)})
    for (name, kind, _), number in zip(code, times, strict=True):
        pipe, each = _hold(name, kind, capability)
        if pipe:
            cycles[pipe] += each * number
    return cycles


def _hold(name: str, kind: str, capability: int) -> tuple[str, float]:
    """The pipe of a scheduler, or "", and the cycles that an instruction of a warp holds it, if all schedulers work."""
    if name.endswith("MMA"):
        by_group = name.endswith("GMMA")  # four warps share it (Hopper's wgmma)
        rate = INT8_A_CLOCK[capability] / SCHEDULERS * (0.5 if name.startswith("H") else 1.0)
        rate *= WARP_ALONE if capability == 90 and not by_group else 1.0
        sides = _SIDES.search(kind)
        operations = 2 * prod(int(side) for side in sides.groups() if side) if sides else 0
        return "tensor", operations // (SCHEDULERS if by_group else 1) / rate
    pipe, cycles = _PIPES.get(name, ("", 0) if name.startswith("U") else ("alu", 2))
    if pipe == "fma" and capability < OLDEST_WIDE:
        cycles = 2
    if name in ("LDSM", "STSM"):
        cycles *= {".2": 2, ".4": 4}.get(kind[-2:], 1)  # matrices
    elif pipe == "memory":
        cycles *= 4 if ".128" in kind else 2 if ".64" in kind else 1
    return pipe, cycles


def count_trips(prepared: PreparedLaunch) -> tuple[int, ...]:
    """How often each loop of the kernel runs, by depth; loops that the compiler unrolls are not in its code."""
    c, name = prepared.constants, prepared.kernel.rpartition(".")[2]
    key_tiles = -(-(c["WINDOW"] ** 2) // c["BKEYS"]) if "BKEYS" in c else 1
    if name == "attention_norm":
        return c["HEADS"], key_tiles
    if name == "attention":
        return (c["WINDOWS"], key_tiles) if c["WINDOWS"] > 1 else (key_tiles,)
    if name == "norm_gemm":
        return (c["GROUP"],)
    loops = {"gemm": ("K", "BK"), "gemm_norm": ("K", "BK"), "mlp": ("HIDDEN", "BH"), "pool": ("TOKENS", "ROWS")}
    return (-(-c[loops[name][0]] // c[loops[name][1]]),) if name in loops else ()


def find_bounds(launch: Launch, counts: KernelCounts, machine: Machine) -> dict[str, float]:
    """Microseconds by the names in `REACHED`, before shares, for a launch with its default tiles."""
    gpu, prepared, c = machine.gpu, make_kernel(launch).prepare(), counts.cycles
    programs, clock = prod(prepared.grid), clock_ghz(machine) * 1e3  # clocks a microsecond
    each = -(-programs // gpu.sms)  # on the busiest multiprocessor
    resident = max(1, min(each, resident_programs(gpu.capability, counts.warps, counts.registers, counts.shared)))
    warps = max(1.0, each * counts.warps / SCHEDULERS)
    # Bytes of weights that each program reads; of a product alone also of its rows
    k, operands = prepared.constants, launch.operands
    groups = -(-k["N"] // k["BN"]) // k["GROUP"] if "GROUP" in k else 1  # those of others read the other columns
    read = sum(operands[word].nbytes for word in ("w", "w1") if word in operands) / groups
    if launch.op == "gemm":
        read = (k["BM"] + k["BN"]) * k["K"] * operands["a"].dtype.itemsize
    # Float32 products, the head's alone, get the peak of half precision.
    tops = {"int8": machine.int8_tops, "fp8": gpu.fp8_tflops or nan}.get(launch.products, machine.float_tflops)
    return {
        "memory": sum(one.nbytes for one in operands.values()) / (machine.bandwidth_gbs * 1e3),
        "cache": each * read / FROM_CACHE / clock,
        "products": max(launch.operations / tops / 1e6, warps * c["tensor"] / clock),
        **{name: warps * c[name] / clock for name in ("issue", "alu", "fma", "special")},
        "loads": warps * c["memory"] / clock,
        "chain": -(-each // resident) * c["issue"] * ALONE / clock,
    }


def estimate_us(launch: Launch, counts: KernelCounts, machine: Machine) -> float:
    """Microseconds of a launch with its default tiles, from the counts of its kernel."""
    bounds = find_bounds(launch, counts, machine)
    return machine.gpu.launch_us + max(time / REACHED[name] for name, time in bounds.items())


def clock_ghz(machine: Machine) -> float:
    """The clock at which the GPU's tensor cores have the peak of its data sheet."""
    gpu = machine.gpu
    return machine.int8_tops * 1e3 / (gpu.sms * INT8_A_CLOCK[gpu.capability])


def resident_programs(capability: int, warps: int, registers: int, shared: int) -> int:
    """The number of programs that run on one multiprocessor at a time; 0 if its shared memory does not suffice for one.

    `registers`: of a thread; `shared`: bytes of a program.
    """
    memory, threads, programs = LIMITS[capability]
    each = -(-max(registers, 1) * 32 // 256) * 256
    return min(REGISTERS // (each * warps), memory // (shared + RESERVED), threads // (32 * warps), programs)
