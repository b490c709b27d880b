"""How far two traces are apart, tensor by tensor, and where they part."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.score.traces import GROUPS, Trace


@dataclass(frozen=True)
class Aligned:
    """One tensor of both sides: largest and mean |Δ|, cosine, and SQNR in dB of B against A (inf: equal).

    `problem`: why it could not be compared; the figures are NaN then.
    """

    group: str
    name: str
    max: float = math.nan
    mean: float = math.nan
    cosine: float = math.nan
    sqnr_db: float = math.nan
    problem: str | None = None

    def below(self, limit: float) -> bool:
        """Whether the sides differ here: an SQNR below `limit` dB, or none."""
        return self.problem is not None or not self.sqnr_db >= limit


class _Apart:
    """What is summed up over batches, in float64."""

    def __init__(self) -> None:
        self.count, self.largest = 0, 0.0
        self.delta = self.noise = self.a = self.b = self.product = 0.0
        self.problem: str | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        if a.numel() != b.numel():
            self.problem = f"{list(a.shape)} against {list(b.shape)}"
            return
        x, y = a.detach().cpu().double().flatten(), b.detach().cpu().double().flatten()
        if not (x.isfinite().all() and y.isfinite().all()):
            sides = [side for side, values in (("A", x), ("B", y)) if not values.isfinite().all()]
            self.problem = f"NaN or infinity in {' and '.join(sides)}"
            return
        delta = (x - y).abs()
        self.count += delta.numel()
        self.largest = max(self.largest, delta.max().item() if delta.numel() else 0.0)
        self.delta += delta.sum().item()
        self.noise += delta.square().sum().item()
        self.a, self.b = self.a + x.square().sum().item(), self.b + y.square().sum().item()
        self.product += torch.dot(x, y).item()

    def row(self, group: str, name: str) -> Aligned:
        if self.problem or not self.count:
            return Aligned(group, name, problem=self.problem or "empty")
        norms = math.sqrt(self.a * self.b)
        cosine = self.product / norms if norms else 1.0 if self.noise == 0 else 0.0
        sqnr = math.inf if self.noise == 0 else -math.inf if self.a == 0 else 10 * math.log10(self.a / self.noise)
        return Aligned(group, name, self.largest, self.delta / self.count, cosine, sqnr)


class Tally:
    """Compares what two sides compute, batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, _Apart] = {}
        self.only: tuple[set[str], set[str]] = (set(), set())  # what just one side has

    def add(self, a: Trace, b: Trace) -> None:
        """One batch: names that both have, in A's order."""
        for mine, names in zip(self.only, (a.keys() - b.keys(), b.keys() - a.keys()), strict=True):
            mine |= names
        for name in a:
            if name in b:
                self._sums.setdefault(name, _Apart()).add(a[name], b[name])

    def rows(self) -> list[Aligned]:
        """Group by group, and within one in the order computed."""
        split = [(name.partition("/")[0], name.partition("/")[2], sums) for name, sums in self._sums.items()]
        return [sums.row(group, name) for group, name, sums in sorted(split, key=lambda row: GROUPS.index(row[0]))]


@dataclass(frozen=True)
class Differences:
    """Two sides compared: a row for each tensor that both have, in the order computed.

    `below`: the SQNR in dB under which they are said to differ. `only`: how many tensors just A, just B has.
    """

    a: str
    b: str
    rows: Sequence[Aligned]
    below: float
    pictures: int
    only: tuple[int, int] = (0, 0)

    @property
    def first(self) -> Aligned | None:
        """The first tensor that differs: what computes it is at fault, or what it reads besides."""
        return next((row for row in self.rows if row.below(self.below)), None)

    @property
    def drop(self) -> tuple[Aligned, Aligned] | None:
        """Where the SQNR of the forward pass falls most from one tensor to the next that is worse than all before."""
        return largest_drop([row for row in self.rows if row.group in ("forward", "output") and not row.problem])


def largest_drop(rows: Iterable[Aligned]) -> tuple[Aligned, Aligned] | None:
    """(the worst so far, the one that is worse yet by the most dB); None where nothing gets worse."""
    best: tuple[float, Aligned, Aligned] | None = None
    worst: Aligned | None = None
    for row in rows:
        if worst is not None and row.sqnr_db < worst.sqnr_db:
            fall = worst.sqnr_db - row.sqnr_db
            if not math.isinf(worst.sqnr_db) and (best is None or fall > best[0]):
                best = fall, worst, row
        if worst is None or row.sqnr_db < worst.sqnr_db:
            worst = row
    return (best[1], best[2]) if best else None
