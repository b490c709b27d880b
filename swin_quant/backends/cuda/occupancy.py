"""How many programs of a kernel a multiprocessor holds at a time."""

from dataclasses import dataclass

RESERVED = 1024  # bytes of shared memory that every program takes besides its own


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
