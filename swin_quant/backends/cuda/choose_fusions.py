"""Choose the fusions of a program for a GPU by the table in its file in `configs/machines`.

`python tools/cuda/fusions.py` estimates the table; `python tools/cuda/tune.py` measures parts of it.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swin_quant.backends.cuda.fusions import Fusion, Group, Row, fused, rows
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.machines import Machine
from swin_quant.backends.cuda.program import Launch, Program, make_kernel
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.base.errors import SwinQuantError

OPERANDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
# Operands (int8, float8, half) -> title of a fusion -> channels -> tokens from which it is taken, left, taken, ...
FusionTable = Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]


@dataclass(frozen=True)
class Size:
    """What the choice of a fusion depends on: the type of its products' operands (int8, float8 or half), their
    narrowest side in channels, and the number of tokens in a batch."""

    operands: str
    channels: int
    tokens: int


def get_size(group: Group) -> Size:
    """The size of launches that can be fused."""
    products = [one.arguments for one in group if one.op == "gemm"]
    weights, a = [one["w"] for one in products], products[0]["a"]
    channels = min(side for weight in weights for side in weight.shape)
    return Size(OPERANDS.get(weights[0].dtype, "half"), channels, a.shape[0])


def fused_program(spec: NetworkSpec, batch: int, machine: Machine | None) -> Program:
    """The program of `spec` as a GPU runs it; without a machine, nothing is fused."""
    program = build_program(spec, batch)
    return fused(program, listed(program.launches, machine.gpu.fusions)) if machine else program


def listed(launches: Sequence[Launch], table: FusionTable) -> list[Row]:
    """The grouping of launches by a GPU's table: at each launch the first fusion that fits and is in the table."""
    return rows(launches, lambda fusion, left: _is_listed(fusion, left, table))


def _is_listed(fusion: Fusion, launches: Sequence[Launch], table: FusionTable) -> bool:
    if not fusion.fits(launches):
        return False
    group = launches[: len(fusion.patterns)]
    size = get_size(group)
    widths = table.get(size.operands, {}).get(fusion.title)
    if not widths:
        return False
    nearest = min(widths, key=lambda word: max(int(word) / size.channels, size.channels / int(word)))
    if bisect(widths[nearest], size.tokens) % 2 == 0:
        return False
    try:
        make_kernel(fusion.merged(group)).prepare()
    except SwinQuantError:  # the network is narrower than the tiles
        return False
    return True
