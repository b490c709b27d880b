"""Results of engines: their distance from a checkpoint or from each other, the classes that they find."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import finite
from swin_quant.cards.records import VerificationRecord
from swin_quant.report.graph import IntegerProducts
from swin_quant.report.table import Column, Printed, ReportTable, field, figure, records
from swin_quant.score.alignment import Aligned
from swin_quant.score.engine import Engine
from swin_quant.score.run_engines import INT8_LEVELS
from swin_quant.score.scoring import Guess

_STYLES = {"pass": "green", "FAIL": "red", None: ""}


def _verdict(record: VerificationRecord) -> str | None:
    return None if record["passed"] is None else "pass" if record["passed"] else "FAIL"


def _products(record: VerificationRecord) -> str | None:
    """How many of the quantized products run in int8, as 48/63."""
    return f"{record['int8_products']}/{record['quantized_products']}" if record.get("quantized_products") else None


VERIFICATION: tuple[Column[VerificationRecord], ...] = (
    Column("engine", "engine", field("engine")),
    Column("precision", "type", field("precision")),
    Column("reference", "against", field("reference")),
    figure("mean", "mean", field("mean"), "{:.5f}"),
    figure("max", "max", field("max"), "{:.5f}"),
    figure("steps", "max/step", lambda one: one["max"] / one["step"] if one["step"] else None, "{:.2f}", spare=True),
    figure("agreement", "agree %", field("agreement"), "{:.2f}"),
    figure("cosine", "cosine", lambda record: record.get("cosine"), "{:.5f}", spare=True),
    figure("sqnr_db", "SQNR dB", field("sqnr_db"), "{:.1f}"),
    figure("tolerance", "limit of mean", field("tolerance"), "{:.3g}"),
    Column("int8_products", "int8", _products, may_lack=True, spare=True),
    Column("passed", "verdict", _verdict, blank="", style=lambda record: _STYLES[_verdict(record)]),
)


@dataclass(frozen=True)
class Verification(Printed):
    """How far the logits of an artifact are from its checkpoint's; printed, it is a table.

    `cautions`: why an engine computes something else on this CPU, with the remedy.
    """

    records: Sequence[VerificationRecord]
    file: Path
    cautions: Sequence[str] = ()

    @property
    def failures(self) -> list[str]:
        """A clause for each engine that runs quantized products in float, and each record beyond its tolerance."""
        found = {}
        for record in self.records:
            if record.get("quantized_products"):
                counts = IntegerProducts(record["quantized_products"], record["int8_products"])
                if counts.is_float:
                    what = f"is called int8, and {record['engine']} runs it in float: {counts}"
                    found[record["engine"]] = f"{what} (`swin-quant show` names the others)"
        return [*found.values()] + [
            f"{record['engine']}: mean |Δlogit| against {record['reference']} is {record['mean']:.4g}, "
            f"not below {record['tolerance']:.3g}"
            for record in self.records
            if record["passed"] is False
        ]

    def __bool__(self) -> bool:
        return not self.failures

    def check(self) -> None:
        """SwinQuantError where an engine is not within its tolerance."""
        if self.failures:
            raise SwinQuantError(f"{self.file}: verification failed: {'; '.join([*self.failures, *self.cautions])}")

    def tables(self) -> list[ReportTable[VerificationRecord]]:
        pictures, scale = self.records[0]["pictures"], f"amax / {INT8_LEVELS}"
        remark = f"|Δlogit| on {pictures} pictures; max/step: in int8 steps over the reference's logits, {scale}"
        if "cosine" in self.records[0]:
            remark = f"|Δ| on {pictures} pictures, in units of the reference's mean magnitude; step: of int8, {scale}"
        return [ReportTable(VERIFICATION, self.records, [remark])]

    def to_json(self) -> Sequence[VerificationRecord]:
        """The records, as in the run card."""
        return self.records


def _db(row: Aligned) -> str:
    return "equal" if row.sqnr_db == math.inf else f"{row.sqnr_db:.1f}"


def _known(name: str) -> Any:
    def value(row: Aligned) -> float | None:
        found: float = getattr(row, name)
        return None if math.isnan(found) else found

    return value


ALIGNMENT: tuple[Column[Aligned], ...] = (
    Column("group", "group", field("group")),
    Column("name", "tensor", field("name"), fold=True),
    figure("max", "max |Δ|", _known("max"), "{:.3g}"),
    figure("mean", "mean |Δ|", _known("mean"), "{:.3g}"),
    figure("cosine", "cosine", _known("cosine"), "{:.6f}"),
    Column("sqnr_db", "SQNR dB", _known("sqnr_db"), show=_db, right=True),
    Column("problem", "problem", field("problem"), may_lack=True),
)


@dataclass(frozen=True)
class Alignment(Printed):
    """How far two sides are apart: a row for each tensor that both have, in the order computed; printed, it is a table.

    `below`: the SQNR in dB below which they differ. `only`: the number of tensors that only A, and only B, has.
    `shown`: patterns of the names that are printed; empty: all.
    """

    a: str
    b: str
    rows: Sequence[Aligned]
    below: float
    pictures: int
    only: tuple[int, int] = (0, 0)
    shown: tuple[str, ...] = ()

    @property
    def first(self) -> Aligned | None:
        """The first tensor that differs: the module that computes it is at fault, or its other inputs."""
        return next((row for row in self.rows if row.below(self.below)), None)

    @property
    def drop(self) -> tuple[Aligned, Aligned] | None:
        """The largest fall of SQNR in the forward pass, from the worst tensor so far to the next worse one."""
        rows = [row for row in self.rows if row.group in ("forward", "output") and not row.problem]
        worst: Iterator[Aligned] = accumulate(rows, lambda *pair: min(pair, key=lambda row: row.sqnr_db))
        falls = [(one, row) for one, row in zip(worst, rows[1:], strict=False) if row.sqnr_db < one.sqnr_db < math.inf]
        return max(falls, key=lambda pair: pair[0].sqnr_db - pair[1].sqnr_db, default=None)

    def tables(self) -> list[ReportTable[Aligned]]:
        remarks = [f"A: {self.a}; B: {self.b}; {self.pictures} pictures; SQNR of B against A"]
        first, drop = self.first, self.drop
        if first is None:
            remarks.append(f"no tensor of {len(self.rows)} is below {self.below:g} dB")
        else:
            why = first.problem or f"{_db(first)} dB, below {self.below:g}"
            remarks.append(f"first divergence: {first.group}/{first.name} ({why})")
        if drop:
            remarks.append(f"largest fall: at {drop[1].name}, from {_db(drop[0])} to {_db(drop[1])} dB")
        if any(self.only):
            remarks.append(f"not compared: {self.only[0]} tensors that only A shows, {self.only[1]} that only B does")
        is_shown = [not self.shown or any(fnmatchcase(row.name, one) for one in self.shown) for row in self.rows]
        rows = [row for row, wanted in zip(self.rows, is_shown, strict=True) if wanted]
        return [ReportTable(ALIGNMENT, rows, remarks, lambda row: "red" if row is first else "")]

    def to_json(self) -> dict[str, Any]:
        """All tensors, the first that differs, and the largest fall of SQNR."""
        first, drop = self.first, self.drop
        return finite(
            {
                "schema": "swin-quant/alignment/1",
                "a": self.a,
                "b": self.b,
                "pictures": self.pictures,
                "below_db": self.below,
                "first": f"{first.group}/{first.name}" if first else None,
                "largest_fall": drop[1].name if drop else None,
                "fall_from_db": drop[0].sqnr_db if drop else None,
                "tensors": records(ALIGNMENT, self.rows),
            }
        )


PREDICTIONS: tuple[Column[dict[str, Any]], ...] = (
    Column("picture", "picture", field("picture"), fold=True, blank=""),
    figure("percent", "%", field("percent"), "{:.2f}"),
    figure("index", "index", field("index")),
    Column("class", "class", field("name"), fold=True),
)


class Guesses(dict[str, list[Guess]], Printed):
    """The most probable classes of each picture, by its name; printed, it is a table.

    `model`: its name; `engine`: what it runs on; `unreadable`: why a picture could not be read, by its name.
    """

    def __init__(
        self, answers: Mapping[str, list[Guess]], model: str, engine: Engine, unreadable: Mapping[str, str]
    ) -> None:
        super().__init__(answers)
        self.model, self.engine, self.unreadable = model, engine, unreadable

    def tables(self) -> list[ReportTable[dict[str, Any]]]:
        rows = [  # the picture's name stands beside its first class
            {"picture": None if rank else picture, "percent": 100 * one.probability, **asdict(one)}
            for picture, best in self.items()
            for rank, one in enumerate(best)
        ]
        remark = f"{self.model}: {self.engine.label} on {self.engine.name}"
        return [ReportTable(PREDICTIONS, rows, [remark], style=lambda row: "" if row["picture"] else "dim")]

    def to_json(self) -> dict[str, Any]:
        """The answers, what gave them, and the pictures that could not be read."""
        return {
            "schema": "swin-quant/predictions/1",
            "model": self.model,
            "engine": self.engine.name,
            "precision": self.engine.precision,
            "policy": self.engine.policy,
            "pictures": [{"picture": name, "classes": [asdict(guess) for guess in top]} for name, top in self.items()],
            "unreadable": dict(self.unreadable),
        }
