"""Read a kernel's machine code (SASS): its instructions by pipe, with loops times their trips, and one warp's time.

Every instruction in front of the last `EXIT` counts as executed; branches forward count as not taken.

Pipes and rates: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions", and Nsight Compute's
description of the pipes (conversions between integers and floats run beside MUFU). Latencies: Luo et al., "Dissecting
the NVIDIA Hopper Architecture through Microbenchmarking", 2025 (memory, shared memory, matrix instructions), rounded;
loads are taken to hit the L2 cache, where the launch before has written and other programs have read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

SCHEDULERS = 4  # of a multiprocessor; a warp stays with one of them
LANES = 32
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
_STORES = {"ST", "STG", "STL", "STS", "STSM", "RED", "LDGSTS", *_CONTROL} - {"S2R", "S2UR", "R2UR", "LDC", "ULDC"}
_LATENCY = {
    "LDG": 270, "LD": 270, "LDL": 40, "LDS": 29, "LDSM": 33, "SHFL": 24, "MUFU": 23, "I2F": 14, "F2I": 14, "F2F": 14,
    "FRND": 14, "S2R": 20, "S2UR": 20, "R2UR": 12, "LDC": 30, "ULDC": 20, "BAR": 25, "IMMA": 33, "HMMA": 33, "QMMA": 33,
}  # fmt: skip
_ARITHMETIC = 5  # cycles until a result of the other pipes can be read
_COPY = 300  # from the cache into shared memory
_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)((?:\.\w+)*)\s*([^;]*);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\b(U?P|U?R)(\d+)\b")
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
    stores, shuffles), `tensor`. `operations`: of matrix instructions. `serial`: cycles that a warp alone takes, in
    order, each instruction waiting for its operands.
    """

    issue: float
    alu: float
    fma: float
    special: float
    memory: float
    tensor: float
    operations: float
    serial: float


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
    return Counts(sum(times), **pipes, operations=operations, serial=_Warp(capability).time(code, loops, trips))


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


@dataclass
class _Warp:
    """A warp alone on its scheduler. It issues in order, one instruction a cycle, when the operands are there."""

    capability: int
    now: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)  # by register
    free: dict[str, float] = field(default_factory=dict)  # by pipe
    copies: list[float] = field(default_factory=list)  # groups of copies to shared memory, by the time they end
    copied: float = 0.0
    products: float = 0.0  # the end of the last product of a warp group

    def time(self, code: Sequence[Instruction], loops: Sequence[tuple[int, int]], trips: Sequence[int]) -> float:
        self._run(code, loops, trips, 0, len(code) - 1)
        return self.now

    def _run(
        self, code: Sequence[Instruction], loops: Sequence[tuple[int, int]], trips: Sequence[int], first: int, last: int
    ) -> None:
        """Instructions `first` to `last`; a loop runs twice, and its other trips take as long as the second."""
        starts = {a: b for a, b in sorted(loops) if first <= a and b <= last}
        at = first
        while at <= last:
            if (end := starts.get(at)) is None:
                self._issue(code[at])
                at += 1
                continue
            inner = [loop for loop in loops if at <= loop[0] and loop[1] <= end and loop != (at, end)]
            number = trips[0] if trips else 1
            for trip in range(min(number, 2)):
                before = self.now
                self._run(code, inner, trips[1:], at, end)
                if trip:
                    self._skip((number - 2) * (self.now - before))
            at = end + 1

    def _skip(self, cycles: float) -> None:
        self.now += cycles
        self.copied, self.products = self.copied + cycles, self.products + cycles
        self.copies = [end + cycles for end in self.copies]
        for times in (self.ready, self.free):
            times.update({word: end + cycles for word, end in times.items()})

    def _issue(self, one: Instruction) -> None:
        pipe, cycles = one.pipe(self.capability)
        cycles /= SCHEDULERS if pipe == "memory" else 1  # no other scheduler's warps compete
        results, sources = _registers(one)
        start = max([self.now, self.free.get(pipe, 0.0), *(self.ready.get(word, 0.0) for word in sources)])
        if one.name == "DEPBAR" or one.kind.startswith("LDGDEPBAR"):
            start = self._copies(one, start)
        elif one.kind.startswith("WARPGROUP.DEPBAR"):
            start = max(start, self.products)
        self.now = start + 1
        if pipe:
            self.free[pipe] = start + cycles
        if one.name == "BAR":
            self.now += _LATENCY["BAR"]
        elif one.name == "LDGSTS":
            self.copied = max(self.copied, start + _COPY)
        elif one.by_group:
            self.products = start + cycles + _LATENCY["IMMA"]
        end = start + max(cycles, 1) - 1 + _LATENCY.get(one.name, _ARITHMETIC)
        self.ready.update(dict.fromkeys(results, end))

    def _copies(self, one: Instruction, start: float) -> float:
        """LDGDEPBAR closes a group of copies; DEPBAR waits until no more groups than its number are left."""
        if one.name == "LDGDEPBAR":
            self.copies.append(self.copied)
            return start
        left = re.search(r"SB\d+, (0x[0-9a-f]+|\d+)", one.operands)
        number = int(left[1], 0) if left else 0
        ended = self.copies[: len(self.copies) - number] if number else self.copies
        self.copies = self.copies[len(ended) :]
        return max([start, *ended])


def _registers(one: Instruction) -> tuple[list[str], list[str]]:
    """Registers written and read; predicates too."""
    parts = [part.strip() for part in one.operands.split(",")]
    number = 0
    if one.name not in _STORES and not one.by_group and one.operands:
        number = 1
        while number < len(parts) and re.match(r"U?P[\dT]", parts[number]) and number < 3:
            number += 1  # a compare writes two predicates, an addition its carries behind the sum
    results = [word for part in parts[:number] for word in _words(part, _written(one))]
    sources = [word for part in parts[number:] for word in _words(part, _read(one, part))]
    return results, sources + ([one.guard.lstrip("!")] if one.guard else [])


def _words(part: str, width: int) -> list[str]:
    return [
        f"{kind}{int(number) + more}"
        for kind, number in _REGISTER.findall(part)
        for more in range(width if "R" in kind else 1)
    ]


def _written(one: Instruction) -> int:
    if one.is_product:
        return 4
    if one.name == "CS2R" or ".WIDE" in one.kind:
        return 2
    return one.width if one.name in _MEMORY else 1


def _read(one: Instruction, part: str) -> int:
    if one.is_product:
        return 4
    return one.width if one.name in _STORES and "[" not in part else 2 if ".64" in part else 1
