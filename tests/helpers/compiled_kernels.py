"""Kernels compiled for GPUs that are not here: registers, memory, instructions, and the faults in them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crosscompile import KernelCall, compiled, tool, usage
from estimates import resident_programs

TARGETS = (80, 86, 89, 90, 100, 120)
_MMA = re.compile(r"\b(I|IG|H|HG|Q|QG|O|UTC[A-Z]*)(?=MMA\b)")
# In Triton's input to LLVM: how warps share results of tensor cores, with one of them, and the products.
_LAYOUT = re.compile(r"^(#\w+) = #\S*nvidia_mma<.*warpsPerCTA = \[(\d+), (\d+)\].*instrShape = \[(\d+), (\d+)", re.M)
_PRODUCT = re.compile(r"\b(?:dot|warp_group_dot) .* : \S*?<(\d+)x(\d+)x.* -> tensor<\d+x(\d+)x\w+, (#\w+)>")
_WARP_GROUP = 64, 4  # rows of a tile, warps
_HALVES = "*fp16", "*bf16"
_AGAIN = 1.25  # most times its products: 8 warps of the widest projections after attention share a head's 32 channels
_GROUPS_ALONE = 90, 100  # capabilities whose float8 products take whole warp groups


@dataclass(frozen=True)
class CompiledKernel:
    """The compiler's result for one GPU. Sizes in bytes; `mma`: matrix instructions in its machine code, by name;
    `repeated`: how many times its products are computed, as some warps do the same; `eased`: it has all registers of a
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
        """The number that run on one multiprocessor at a time; 0 if its shared memory does not suffice for one."""
        return resident_programs(self.capability, self.warps, self.registers, self.shared)

    @property
    def int8(self) -> bool:
        """Whether products run in int8 on tensor cores."""
        return bool({"IMMA", "IGMMA", "UTCIMMA"} & self.mma.keys())

    @property
    def float8(self) -> bool:
        """Whether products run in float8 on tensor cores."""
        return bool({"QMMA", "QGMMA", "UTCQMMA"} & self.mma.keys())


def cross_compile(call: KernelCall, capability: int) -> CompiledKernel:
    """`compiled`, with its machine code read."""
    _, made = compiled(call, capability)
    registers, spilled = usage(made)
    names = [f"{kind}MMA" for kind in _MMA.findall(tool("nvdisasm", "-c", made))]
    mma = {name: names.count(name) for name in sorted(set(names))}
    eased = made.metadata.maxnreg is not None and "maxnreg" not in dict(call.options)
    again = repeated(made.asm["ttgir"])
    return CompiledKernel(
        capability, made.metadata.num_warps, registers, spilled, made.metadata.shared, mma, again, eased
    )


def repeated(ttgir: str) -> float:
    """Tensor core multiplications divided by the needed ones, from the way Triton shares results among warps.

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


def kernel_faults(call: KernelCall, made: CompiledKernel) -> Iterator[str]:
    """A line for each fault."""
    types, constants = dict(call.types), dict(call.constants)
    operand = types.get("w", types.get("qkv", types.get("weight")))  # norms' weights are float32
    rows = min(constants.get(side, _WARP_GROUP[0]) for side in ("BM", "BQ"))
    by_groups = rows >= _WARP_GROUP[0] and made.warps >= _WARP_GROUP[1]
    if made.spilled:
        yield f"spills {made.spilled} bytes"
    if not made.programs:
        yield f"{made.shared} bytes of shared memory, more than a program may have"
    if made.repeated > _AGAIN:
        yield f"warps compute the same: {made.repeated:.2f} times its products"
    if operand == "*i8" and not made.int8:
        yield "no int8 tensor-core instructions"
    if operand == "*fp8e4nv" and not made.float8 and (by_groups or made.capability not in _GROUPS_ALONE):
        yield "no float8 tensor-core instructions"
    if operand in _HALVES and not made.mma:
        yield "no tensor-core instructions"
    if made.capability == 90 and by_groups and "IMMA" in made.mma:
        yield "not by warp groups"
