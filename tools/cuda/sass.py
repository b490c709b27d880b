"""Read a kernel's machine code (SASS): its instructions by pipe, with loops times their trips.

Every instruction in front of the last `EXIT` counts as executed; branches forward count as not taken.

Pipes and rates: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions", and Nsight Compute's
description of the pipes (conversions between integers and floats run beside MUFU).
The share of a single warp: Luo et al., "Dissecting the NVIDIA Hopper Architecture through Microbenchmarking", 2025.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

SCHEDULERS = 4  # of a multiprocessor; a warp stays with one of them
PIPES = ("alu", "fma", "special", "memory", "tensor")
OLDEST_WIDE = 86  # compute capability from which a scheduler has 32 float lanes; 8.0 has 16
# int8 operations a clock of a multiprocessor's tensor cores: data sheets' peaks over multiprocessors and clocks.
INT8_A_CLOCK = {80: 4096, 86: 2048, 89: 2048, 90: 8192, 100: 16384, 120: 2048}
WARP_ALONE = 0.62  # share of Hopper's peak that instructions of one warp reach (Luo et al.)
_FMA = {"FADD", "FMUL", "FFMA", "FFMA2", "HFMA2", "HADD2", "HMUL2", "FSWZADD"}
_WIDE_INTEGER = {"IMAD", "IMUL", "FMUL32I", "FADD32I", "FFMA32I"}  # on half of the float lanes
_SPECIAL = {"MUFU", "I2F", "F2I", "F2F", "FRND", "I2I", "POPC", "FLO"}
_CONTROL = {
    "BRA", "EXIT", "BAR", "BSSY", "BSYNC", "CALL", "RET", "WARPGROUP", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "MEMBAR",
    "FENCE", "ERRBAR", "CCTL", "NANOSLEEP", "YIELD", "S2R", "S2UR", "R2UR", "LDC", "LDCU", "ULDC", "UMOV",
}  # fmt: skip
_MEMORY = {"LD", "LDG", "LDL", "LDS", "LDSM", "LDGSTS", "ST", "STG", "STL", "STS", "STSM", "SHFL", "ATOM", "RED"}
_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)((?:\.\w+)*)\s*([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SIDES = re.compile(r"\.(\d+)x(\d+)x(\d+)\b|\.(16)(8)(8|16|32|64)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name` before the first dot, `kind` with the rest, and its operands as text."""

    name: str
    kind: str
    operands: str
    guard: str = ""

    @property
    def width(self) -> int:
        """32-bit words that a thread moves."""
        if self.name in ("LDSM", "STSM"):
            return 4 if self.kind.endswith(".4") else 2 if self.kind.endswith(".2") else 1
        return 4 if ".128" in self.kind else 2 if ".64" in self.kind else 1

    @property
    def is_product(self) -> bool:
        return self.name.endswith("MMA")

    @property
    def operations(self) -> int:
        """Operations that a warp's share of a matrix instruction takes, two a multiply-add."""
        found = _SIDES.search(self.kind)
        if not self.is_product or found is None:
            return 0
        sides = [int(side) for side in found.groups() if side]
        return 2 * prod(sides) // (SCHEDULERS if self.by_group else 1)

    @property
    def by_group(self) -> bool:
        """Whether four warps share a matrix instruction (Hopper's wgmma)."""
        return self.name.endswith("GMMA")

    def pipe(self, capability: int) -> tuple[str, float]:
        """The pipe of a scheduler, or "", and the cycles that the instruction of a warp holds it, if all schedulers
        work."""
        if self.is_product:
            rate = INT8_A_CLOCK[capability] / SCHEDULERS
            rate *= 0.5 if self.name.startswith("H") else 1.0
            rate *= WARP_ALONE if capability == 90 and not self.by_group else 1.0
            return "tensor", self.operations / rate
        if self.name in _FMA:
            return "fma", 1 if capability >= OLDEST_WIDE else 2
        if self.name in _WIDE_INTEGER:
            return "fma", 2
        if self.name in _SPECIAL:
            return "special", 8
        if self.name in _MEMORY:  # 128 bytes a clock for all schedulers
            return "memory", SCHEDULERS * self.width
        return ("", 0) if self.name in _CONTROL or self.name.startswith("U") else ("alu", 2)


@dataclass(frozen=True)
class Counts:
    """A program of one warp, from start to end.

    `issue`: instructions. By pipe, cycles of a scheduler that they take: `alu`, `fma`, `special`, `memory` (loads,
    stores, shuffles), `tensor`. `operations`: of matrix instructions.
    """

    issue: float
    alu: float
    fma: float
    special: float
    memory: float
    tensor: float
    operations: float


def counted(sass: str, trips: Sequence[int], capability: int) -> Counts:
    """Count the code of `nvdisasm -c`. `trips` of its loops by depth, the outermost first; a deeper loop runs once."""
    code, loops = parsed(sass)
    times = [1] * len(code)
    for first, last in loops:
        depth = sum(a <= first and last <= b for a, b in loops) - 1
        for at in range(first, last + 1):
            times[at] *= trips[depth] if depth < len(trips) else 1
    pipes = dict.fromkeys(PIPES, 0.0)
    for one, number in zip(code, times, strict=True):
        pipe, cycles = one.pipe(capability)
        if pipe:
            pipes[pipe] += cycles * number
    operations = sum(one.operations * number for one, number in zip(code, times, strict=True))
    return Counts(sum(times), **pipes, operations=operations)


def parsed(sass: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """The instructions up to the last EXIT of the main path, and each loop's first and last."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif (found := _LINE.match(line)) and found[2] != "NOP":
            guard, name, rest, operands = found.groups()
            code.append(Instruction(name, name + rest, operands, guard or ""))
            if name == "EXIT" and not guard:
                break
    loops = []
    for at, one in enumerate(code):
        if one.name == "BRA" and (to := _TARGET.search(one.operands)) and labels.get(to[1], at + 1) < at:
            loops.append((labels[to[1]], at))
    return code, loops
