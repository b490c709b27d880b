"""Choose the fusions that make a program fastest on a GPU: by measured times, by counts of the compiled kernels, or by
floors.

Without counts of every kernel that could be chosen (`estimates`), floors get two limits for kernels whose programs hold
whole rows. With fewer programs than multiprocessors, the other multiprocessors idle. Each program reads all weights
from the cache at the rate of one multiprocessor. Fused attention computes heads one after another, which no floor
counts: by floors it is chosen only if its programs are at least half as many as the multiprocessors.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

from swin_quant.backends.cuda.crosscompile import kernel_of
from swin_quant.backends.cuda.estimates import counts_of, estimate_of, read_by_program
from swin_quant.backends.cuda.floors import floor_of, gpu_of
from swin_quant.backends.cuda.fusions import FUSIONS, Row, fused, with_fusions
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import Launch, Program
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.backends.cuda.tuning import NO_TILES, TileTable, shape_of
from swin_quant.base.errors import SwinQuantError
from swin_quant.operators.roofline import Machine

# From the L2 cache into one multiprocessor: 64 bytes a clock (V100: Jia et al., 2018) at 1.5 GHz.
CACHE_BYTES_US = 96_000
FUSED = {fusion.op for fusion in FUSIONS}


def fused_program(spec: NetworkSpec, batch: int, machine: Machine | None, tuned: TileTable = NO_TILES) -> Program:
    """The program of `spec` as a GPU runs it; without a machine, nothing is fused.

    Measured times are used only if every kernel that could be chosen was timed at one nearby batch: a time cannot be
    compared with a floor, nor with a time at another batch.
    """
    program = program_of(spec, batch)
    if machine is None:
        return program
    launches = program.launches
    times = tuned.times_of(with_fusions(launches), batch)
    modelled = model_of(launches, machine)

    def us(launch: Launch) -> float:
        return times[shape_of(launch)] if times else modelled(launch)

    return fused(program, chosen(launches, us))


def model_of(launches: Sequence[Launch], machine: Machine) -> Callable[[Launch], float]:
    """Microseconds of one of these launches, or of a fusion of them: estimated if the counts of all are at hand, else
    by floors. An estimate cannot be compared with a floor."""
    counts = counts_of(with_fusions(launches), machine)
    if counts is None:
        return lambda launch: modelled_us(launch, machine)
    return lambda launch: estimate_of(launch, counts[launch.name], machine).us


def chosen(launches: Sequence[Launch], us: Callable[[Launch], float]) -> list[Row]:
    """The grouping of launches whose kernels take the least time in sum; of two with equal times, the one with fewer
    kernels."""
    least: list[float] = [0.0] * (len(launches) + 1)
    best: list[Row] = []  # from the last launch to the first
    for at in reversed(range(len(launches))):
        least[at], found = us(launches[at]) + least[at + 1], None
        for fusion in FUSIONS:
            if fusion.fits(launches[at:]):
                end = at + len(fusion.patterns)
                together = us(fusion.merged(launches[at:end])) + least[end]
                if together <= least[at]:
                    least[at], found = together, fusion
        best.append((found, launches[at : at + (len(found.patterns) if found else 1)]))
    best.reverse()
    rows, at = [], 0
    while at < len(launches):
        rows.append(best[at])
        at += len(best[at][1])
    return rows


def modelled_us(launch: Launch, machine: Machine) -> float:
    """The launch's floor; for a fused kernel also the limits of its programs. Infinite for sizes that a fused kernel
    does not take."""
    floor = floor_of([launch], machine)
    if launch.op not in FUSED:
        return floor.us
    try:
        prepared = kernel_of(launch).prepare()
    except SwinQuantError:  # the network is narrower than the tiles
        return inf
    sms, programs = gpu_of(machine).sms, prod(prepared.grid)
    if launch.op == "attention_norm" and 2 * programs < sms:
        return inf
    idle = max(1.0, sms / programs)
    weights = read_by_program(launch, prepared.constants)
    return max(floor.us, floor.compute_us * idle, weights * max(1.0, programs / sms) / CACHE_BYTES_US)
