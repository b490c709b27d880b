"""How far two sides are apart, tensor by tensor, in what they compute of the same images or in a training step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.report.engines import alignment_data, alignment_table
from swin_quant.report.printed import Printed
from swin_quant.report.table import ReportTable
from swin_quant.score.alignment import IMAGES, LABELS, Aligned, Differences, Tally
from swin_quant.verbs.align_sides import Side

FLOAT_BELOW, QUANTIZED_BELOW, MIXED_BELOW = 60.0, 30.0, 15.0  # dB: two float sides, two quantized ones, one of each


@dataclass(frozen=True)
class Alignment(Differences, Printed):
    """How far two sides are apart, tensor by tensor; printed, it is a table of the tensors with names like `shown`."""

    shown: tuple[str, ...] = ()

    def tables(self) -> list[ReportTable[Aligned]]:
        return [alignment_table(self, self.shown)]

    def to_json(self) -> dict[str, Any]:
        """All tensors, and which is the first that differs."""
        return alignment_data(self)


def compare(a: Side, b: Side, batches: Iterable[Tensor] = (), below: float | None = None) -> Alignment:
    """Compare what both sides compute of the same images, batches [B, 3, H, W]; a dump brings its own, if it has any.

    `below`: the SQNR in dB under which two tensors differ. SwinQuantError where not one tensor can be compared.
    """
    if dumps := [side.dumped for side in (a, b) if side.dumped is not None]:
        own = next((dumped[IMAGES] for dumped in dumps if IMAGES in dumped), None)
        if own is None:
            own = torch.cat(list(batches)) if len(dumps) == 1 else torch.empty(0)
        batches = [own.float()]
    tally, count = Tally(), 0
    for images in batches:
        count += len(images)
        ours, theirs = a.trace(images).items(), b.trace(images).items()
        tally.add(*({name: one for name, one in side if name not in (IMAGES, LABELS)} for side in (ours, theirs)))
    return _align(a, b, tally, count, below)


def compare_steps(a: Side, b: Side, below: float | None = None) -> Alignment:
    """Compare two dumps of a training step (`take_step`), group by group in the order of a step."""
    assert a.dumped is not None and b.dumped is not None
    tally = Tally()
    tally.add(a.dumped, b.dumped)
    count = len(next((dumped[IMAGES] for dumped in (a.dumped, b.dumped) if IMAGES in dumped), ()))
    return _align(a, b, tally, count, below)


def _align(a: Side, b: Side, tally: Tally, pictures: int, below: float | None) -> Alignment:
    if below is None:
        kinds = {a.quantized, b.quantized} - {None}
        below = MIXED_BELOW if len(kinds) > 1 else QUANTIZED_BELOW if kinds == {True} else FLOAT_BELOW
    rows, only = tally.rows(), tally.only
    if not rows:
        sides = (listed(sorted(names), 3) or "nothing" for names in only)
        raise SwinQuantError(f"{a.name} and {b.name}: they name no tensor alike: {' - '.join(sides)}")
    if all(row.problem and math.isnan(row.sqnr_db) for row in rows):
        raise SwinQuantError(
            f"{a.name} and {b.name}: no tensor can be compared ({rows[0].group}/{rows[0].name}: {rows[0].problem}): "
            "other pictures, or weights of another model"
        )
    return Alignment(a.name, b.name, rows, below, pictures, (len(only[0]), len(only[1])))
