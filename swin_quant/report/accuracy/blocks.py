"""The table as people read it: a block for each model and list of pictures, a line for each result, float first."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from swin_quant.cards.records import ORIGINAL, UNQUANTIZED, Result
from swin_quant.report.accuracy.footnotes import is_simulated
from swin_quant.report.accuracy.rows import (
    COLUMN,
    AccuracyRow,
    dataset_key,
    delta_style,
    delta_with_error,
    is_float,
    latency,
)
from swin_quant.report.table import BLANK, Column, field, figure, shown, total, widths_of

LEGEND = "Δ ± its standard error, agreement in %: against float32 on the same pictures; ~: less than they can show"
_WEIGHTS_LEGEND = {
    "PTQ": "PTQ: calibrated only, as QAT began",
    "corrected": "corrected: weights that passes changed behind the calibration",
}


@dataclass(frozen=True)
class Line:
    """One result, which `row` has as `quantized` even where it is float; `marks`: the numbers of its footnotes."""

    row: AccuracyRow
    marks: str = ""

    @property
    def result(self) -> Result:
        assert self.row.quantized is not None, "a line has a result"
        return self.row.quantized

    @property
    def is_baseline(self) -> bool:
        return self.row.float32 is not None and self.row.quantized == self.row.float32

    @property
    def called(self) -> str:
        """The weights, the type and the policy."""
        weights = self.row.weights
        if weights in UNQUANTIZED.values():
            return f"{self.result.precision} {weights.partition(',')[0] if weights else ''}"
        words = (weights, self.result.precision, self.row.policy, f"[{self.marks}]" if self.marks else None)
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class TableBlock:
    """The results of one model on one list of pictures. `details`: the facts that they share, for the heading."""

    name: str
    details: tuple[str, ...]
    lines: tuple[Line, ...]

    def columns(self, width: int | None = None) -> list[Column[Line]]:
        """The columns that fit into `width`; None: all."""
        chosen = COLUMNS
        for number in range(len(_EXTRA) + 1):
            chosen = tuple(one for one in COLUMNS if one.key not in _EXTRA[:number])
            if width is None or total(widths_of(shown(chosen, self.lines), self.lines)) <= width:
                break
        return shown(chosen, self.lines)


def blocks_of(rows: Sequence[AccuracyRow], marks: Mapping[int, str]) -> list[TableBlock]:
    """The blocks in the order of the rows; `marks`: the numbers of footnotes by the row's index."""
    found: dict[Hashable, dict[int, AccuracyRow]] = {}
    for index, row in enumerate(rows):
        key = row.card.name, COLUMN["resolution"].cell(row), row.card.original_sha256, dataset_key(row.dataset)
        found.setdefault((key, row.calibrated_by), {})[index] = row
    return [_block(list(some.values()), [marks.get(index, "") for index in some]) for some in found.values()]


def legend(blocks: Sequence[TableBlock]) -> list[str]:
    """The meaning of what the blocks show."""
    lines = [line for block in blocks for line in block.lines]
    found = [LEGEND] if any(COLUMNS_BY_KEY["delta_acc1"].value(line) is not None for line in lines) else []
    weights = dict.fromkeys(line.row.weights for line in lines)
    return found + [text for key, text in _WEIGHTS_LEGEND.items() if key in weights]


def _block(rows: Sequence[AccuracyRow], marks: Sequence[str]) -> TableBlock:
    floats: dict[Hashable, Line] = {}
    quantized: list[Line] = []
    for row, mark in zip(rows, marks, strict=True):
        for base in (row.float32, row.half, *row.others):
            if base:
                _keep(floats, Line(replace(row, quantized=base, policy=None), "" if row.quantized else mark))
        if row.quantized and is_float(row.quantized):
            _keep(floats, Line(row, mark))
        elif row.quantized:
            quantized.append(Line(row, mark))
    lines = _in_order([*floats.values(), *quantized])
    first = rows[0]
    settings = {f"{one.device}, batch {one.batch_size}" for row in rows for one in row.measured if one.ms_per_picture}
    details = (
        COLUMN["resolution"].cell(first),
        f"{first.place}, {first.measured[-1].pictures} pictures",
        f"calibrator {first.calibrated_by}" if first.calibrated_by else BLANK,
        next(iter(settings)) if len(settings) == 1 else BLANK,
    )
    return TableBlock(first.card.name, tuple(text for text in details if text != BLANK), tuple(lines))


def _keep(floats: dict[Hashable, Line], line: Line) -> None:
    """Keep a float line: one that several cards measured once, by its fastest time."""
    one = line.result
    weights = None if one.weights == ORIGINAL else one.weights
    key = one.engine, one.precision, weights, one.acc1, one.acc5
    if key not in floats or latency(one) < latency(floats[key].result):
        floats[key] = line


def _in_order(lines: Sequence[Line]) -> list[Line]:
    """The float32 baseline, what else torch computes in float, then engine by engine, the float lines first."""
    engines = list(dict.fromkeys(line.result.engine for line in lines))

    def place(line: Line) -> tuple[bool, bool, int, bool]:
        unquantized = line.row.weights in UNQUANTIZED.values()
        last = unquantized and line.result.engine == engines[0]
        return last, not line.is_baseline, engines.index(line.result.engine), not is_float(line.result)

    return sorted(lines, key=place)


def _ms(line: Line) -> str:
    return "sim." if is_simulated(line.result.engine) else f"{line.result.ms_per_picture:.2f}"


COLUMNS: tuple[Column[Line], ...] = (
    Column("result", "result", field("called"), fold=True),
    Column("engine", "engine", field("result", "engine"), fold=True),
    figure("acc1", "acc@1", field("result", "acc1"), "{:.2f}"),
    figure("acc5", "acc@5", field("result", "acc5"), "{:.2f}"),
    Column(
        "delta_acc1",
        "Δ acc@1",
        lambda line: None if line.is_baseline else line.row.delta("acc1"),
        show=lambda line: delta_with_error(line.row, 2),
        style=lambda line: delta_style(line.row),
        blank="",
    ),
    figure("agreement", "agree", field("result", "agreement"), "{:.2f}"),
    figure("sqnr_db", "SQNR dB", field("result", "sqnr_db"), "{:.1f}"),
    Column("ms", "ms", field("result", "ms_per_picture"), show=_ms, right=True),
    Column("verified", "verified", field("row", "verified"), may_lack=True, blank=""),
)
COLUMNS_BY_KEY = {column.key: column for column in COLUMNS}
_EXTRA = ("acc5", "sqnr_db")  # left out of a narrow terminal, in this order
