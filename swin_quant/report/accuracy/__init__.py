"""The accuracy-delta table as terminal text, Markdown, CSV, JSON and HTML, each with its footnotes.

People read blocks: a line for each result under a heading with what the results share. A narrow terminal leaves out
columns. CSV and JSON have a row for each quantized result, with every column.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.cells import cell_len

from swin_quant.base.files import json_text
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import ORIGINAL, UNQUANTIZED
from swin_quant.report.accuracy.rows import (
    COLUMNS,
    AccuracyRow,
    Footnote,
    dataset_key,
    delta_style,
    delta_with_error,
    footnotes,
    get_resolution,
    is_simulated,
    latency,
    list_rows,
    numbered,
)
from swin_quant.report.table import (
    BLANK,
    NARROW,
    Column,
    ReportTable,
    bullets,
    comma_separated,
    compute_widths,
    escaped,
    field,
    figure,
    folded,
    grid,
    html_table,
    markdown,
    print_fitted,
    records,
    shown,
    styled,
    total,
)
from swin_quant.score.engine import is_float

SCHEMA = "swin-quant/accuracy-table/1"
LEGEND = "Δ ± its standard error, agreement in %: against float32 on the same pictures; ~: less than they can show"
_WEIGHTS_LEGEND = {
    "PTQ": "PTQ: the calibrated file that QAT began with",
    "corrected": "corrected: weights that passes changed after the calibration",
}


@dataclass(frozen=True)
class TableBlock:
    """The results of one model on one list of pictures. `details`: the facts that they share, for the heading."""

    name: str
    details: tuple[str, ...]
    lines: tuple[AccuracyRow, ...]

    @property
    def heading(self) -> str:
        return f"{self.name}: {', '.join(self.details)}"

    def table(self, remarks: Sequence[str] = (), width: int | None = None) -> ReportTable[AccuracyRow]:
        """The lines, and the columns that fit into `width`; None: all."""
        columns = shown(BLOCK_COLUMNS, self.lines)
        for extra in _EXTRA:
            if width is None or total(compute_widths(columns, self.lines)) <= width:
                break
            columns = [column for column in columns if column.key != extra]
        return ReportTable(columns, self.lines, remarks)

    def lines_on_terminal(self, width: int, color: bool) -> Iterator[str]:
        """The heading, broken between two details where it is wider than `width`, and the table."""
        heading, line = list[str](), f"{self.name}: {self.details[0]}"
        for detail in self.details[1:]:
            if cell_len(f"{line}, {detail},") > width:
                heading += folded(f"{line},", width)
                line = detail
            else:
                line += f", {detail}"
        yield from (styled(line, "bold" * color) for line in (*heading, *folded(line, width)))
        columns = self.table(width=width).columns
        yield from grid(columns, self.lines, compute_widths(columns, self.lines, width), color, rule=True)
        yield ""


def _block(rows: Sequence[AccuracyRow], ways: Mapping[str, Collection[str]]) -> TableBlock:
    """The block of a model's rows. `ways`: the values of each setting of preprocessing in all blocks of this model."""
    floats: dict[Hashable, AccuracyRow] = {}

    def keep(row: AccuracyRow) -> None:
        """Keep a float result: one that several cards measured once, by its fastest time."""
        one = row.result
        weights = None if one.weights == ORIGINAL else one.weights
        key = one.engine, one.precision, weights, one.acc1, one.acc5
        if key not in floats or latency(one) < latency(floats[key].result):
            floats[key] = row

    for row in rows:
        for base in (row.float32, row.half, *row.others):
            if base:
                keep(replace(row, quantized=base, policy=None, marks="" if row.quantized else row.marks))
        if row.quantized and not row.is_quantized:
            keep(row)
    quantized = [row for row in rows if row.is_quantized]
    lines = [*floats.values(), *quantized]
    engines = list(dict.fromkeys(line.result.engine for line in lines))

    def place(line: AccuracyRow) -> tuple[bool, bool, int, bool]:
        """The float32 baseline, torch's other float results, then engine by engine, the float lines first."""
        unquantized = line.weights in UNQUANTIZED.values()
        last = unquantized and line.result.engine == engines[0]
        return last, not line.is_baseline, engines.index(line.result.engine), not is_float(line.result.precision)

    size = get_resolution(rows[0])
    first, measured = rows[0], [one for row in rows for one in row.measured if one.ms_per_picture]
    settings = {f"ms a picture on {one.device}, batch {one.batch_size}" for one in measured}
    details = (
        f"{size}x{size}" if isinstance(size, int) else size or BLANK,
        f"{first.place}, {first.measured[-1].pictures} pictures",
        *(f"{key} {first.card.preprocess.get(key)}" for key, values in ways.items() if len(values) > 1),
        f"calibrator {first.calibrated_by}" if first.calibrated_by else BLANK,
        next(iter(settings)) if len(settings) == 1 else BLANK,
    )
    shared = tuple(text for text in details if text != BLANK)
    return TableBlock(first.card.name, shared, tuple(sorted(lines, key=place)))


def _delta(line: AccuracyRow) -> float | None:
    return None if line.is_baseline else line.delta("acc1")


BLOCK_COLUMNS: tuple[Column[AccuracyRow], ...] = (
    Column("result", "result", field("called"), fold=True),
    Column("engine", "engine", field("result", "engine"), fold=True),
    figure("acc1", "acc@1", field("result", "acc1"), "{:.2f}"),
    figure("acc5", "acc@5", field("result", "acc5"), "{:.2f}"),
    Column("delta_acc1", "Δ acc@1", _delta, show=delta_with_error, style=delta_style, blank=""),
    figure("agreement", "agree", field("result", "agreement"), "{:.2f}"),
    figure("sqnr_db", "SQNR dB", field("result", "sqnr_db"), "{:.1f}"),
    Column(
        "ms",
        "ms",
        field("result", "ms_per_picture"),
        show=lambda one: "sim." if is_simulated(one.result.engine) else f"{one.result.ms_per_picture:.2f}",
        right=True,
    ),
    Column("verified", "verified", field("verified"), may_lack=True, blank=""),
)
_EXTRA = ("acc5", "sqnr_db")  # left out of a narrow terminal, in this order


@dataclass(frozen=True)
class AccuracyTable:
    """Rows and footnotes, found once for all forms."""

    rows: Sequence[AccuracyRow]
    notes: Sequence[Footnote]

    @classmethod
    def from_cards(cls, cards: Sequence[RunCard]) -> "AccuracyTable":
        """The table of run cards."""
        rows = list_rows(cards)
        return cls(rows, footnotes(rows))

    def text(self, form: str, width: int = NARROW, color: bool = False) -> str:
        """The table in one of FORMATS; `width` and `color` are of the terminal."""
        if form == "json":
            return json_text(self.as_data())
        if form == "csv":  # its last column has the row's footnotes
            about: dict[int, list[str]] = {id(row): [] for row in self.rows}
            for note in self.notes:
                for index in note.rows:
                    about[id(self.rows[index])].append(note.text)
            texts: Column[AccuracyRow] = Column("notes", "", lambda row: " | ".join(about[id(row)]))
            return comma_separated([*COLUMNS, texts], self.rows)
        found, remarks = self.blocks()
        if form == "markdown":
            parts = (f"**{escaped(block.heading)}**\n\n{markdown(block.table())}" for block in found)
            return "".join(parts) + "".join(f"* {escaped(remark)}\n" for remark in remarks)
        lines = (line for block in found for line in block.lines_on_terminal(width, color))
        return "".join(f"{line}\n" for line in (*lines, *bullets(remarks, width, color)))

    def html(self) -> str:
        """The blocks as HTML."""
        found, remarks = self.blocks()
        last = found[-1] if found else None
        return "".join(html_table(one.table(remarks if one is last else ()), one.heading) for one in found)

    _repr_html_ = html

    def __str__(self) -> str:
        return self.text("terminal")

    def show(self) -> None:
        """Print it as wide as the terminal, or 100 columns wide into a pipe."""
        print_fitted(partial(self.text, "terminal"), NARROW)

    def as_data(self) -> dict[str, Any]:
        """For JSON: the rows by the same keys as CSV; footnotes with the indices of their rows."""
        texts = [{"text": note.text, "rows": note.rows} for note in self.notes]
        return {"schema": SCHEMA, "rows": records(COLUMNS, self.rows), "footnotes": texts}

    to_json = as_data

    def blocks(self) -> tuple[list[TableBlock], list[str]]:
        """The blocks that people read, and the remarks below them."""
        texts, marks = numbered(self.notes, len(self.rows), in_blocks=True)
        groups: dict[Hashable, list[AccuracyRow]] = {}  # of one model on one list of pictures
        for index, row in enumerate(self.rows):
            pictures = get_resolution(row), row.card.original_sha256, dataset_key(row.dataset)
            prepared = repr(row.card.preprocess)
            group = groups.setdefault((row.card.name, *pictures, row.calibrated_by, prepared), [])
            group.append(replace(row, marks=marks.get(index, "")))
        ways: dict[str, dict[str, set[str]]] = {}  # of preparing pictures: model -> setting -> values
        for row in self.rows:
            for key, value in row.card.preprocess.items():
                ways.setdefault(row.card.name, {}).setdefault(key, set()).add(str(value))
        found = [_block(some, ways.get(some[0].card.name, {})) for some in groups.values()]
        lines = [line for block in found for line in block.lines]
        legend = [LEGEND] if any(_delta(line) is not None for line in lines) else []
        weights = {line.weights for line in lines}
        legend += [text for key, text in _WEIGHTS_LEGEND.items() if key in weights]
        return found, [*legend, *texts]
