"""Choose the fusions of a program for a GPU: by measured times, else by the table in `configs/machines`.

`python tools/cuda/fusions.py` writes a GPU's table into its file.
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swin_quant.backends.cuda.fusions import FUSIONS, Fusion, Group, Row, fused, with_fusions
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.machines import Machine
from swin_quant.backends.cuda.program import Launch, Program, kernel_of
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.backends.cuda.tuning import NO_TILES, TileTable, shape_of
from swin_quant.base.errors import SwinQuantError

OPERANDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}


@dataclass(frozen=True)
class Size:
    """What the choice of a fusion depends on: the type of its products' operands (int8, float8 or half), their
    narrowest side in channels, and the number of tokens in a batch."""

    operands: str
    channels: int
    tokens: int


def size_of(group: Group) -> Size:
    """The size of launches that can be fused."""
    products = [one.arguments for one in group if one.op == "gemm"]
    weights, a = [one["w"] for one in products], products[0]["a"]
    channels = min(side for weight in weights for side in weight.shape)
    return Size(OPERANDS.get(weights[0].dtype, "half"), channels, a.shape[0])


def fused_program(spec: NetworkSpec, batch: int, machine: Machine | None, tuned: TileTable = NO_TILES) -> Program:
    """The program of `spec` as a GPU runs it; without a machine, nothing is fused.

    Measured times are used only if every kernel that could be chosen was timed at one nearby batch: times at two
    batches cannot be compared.
    """
    program = program_of(spec, batch)
    if machine is None:
        return program
    launches = program.launches
    if times := tuned.times_of(with_fusions(launches), batch):
        return fused(program, chosen(launches, lambda launch: times[shape_of(launch)]))
    return fused(program, listed(launches, machine.gpu.fusions))


def listed(launches: Sequence[Launch], table: Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]) -> list[Row]:
    """The grouping of launches by a GPU's table: at each launch the first fusion that fits and is in the table."""
    rows: list[Row] = []
    at = 0
    while at < len(launches):
        one = next((fusion for fusion in FUSIONS if _is_listed(fusion, launches[at:], table)), None)
        end = at + (len(one.patterns) if one else 1)
        rows.append((one, launches[at:end]))
        at = end
    return rows


def _is_listed(
    fusion: Fusion, launches: Sequence[Launch], table: Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]
) -> bool:
    if not fusion.fits(launches):
        return False
    group = launches[: len(fusion.patterns)]
    size = size_of(group)
    widths = table.get(size.operands, {}).get(fusion.title)
    if not widths:
        return False
    nearest = min(widths, key=lambda word: max(int(word) / size.channels, size.channels / int(word)))
    if bisect(widths[nearest], size.tokens) % 2 == 0:
        return False
    try:
        kernel_of(fusion.merged(group)).prepare()
    except SwinQuantError:  # the network is narrower than the tiles
        return False
    return True


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
