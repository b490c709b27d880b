"""The accuracy-delta table for a terminal: a heading with what rows share, the float figures among it, then a line for
each row.

Where the width is short, columns are stacked; a terminal too narrow even for that wraps lines, which loses nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from swin_quant.report.accuracy.columns import COLUMN, COLUMNS, legend, notes_column
from swin_quant.report.accuracy.footnotes import Footnote, numbered
from swin_quant.report.accuracy.rows import AccuracyRow, dataset_key, is_float
from swin_quant.report.column import BLANK, Column, shown
from swin_quant.report.terminal import bullets, folded, grid, styled, total, widths_of

Stack: TypeAlias = tuple[str, ...]  # keys of the table's columns that are one column here, one above the other
_HEADING = ("name", "resolution", "dataset", "pictures")
_AFTER = {"pictures": " pictures", "calibrator": " calibrator"}
_HEADING_IF_ALL_THE_SAME = ("calibrator", "precision", "engine")
_FLOAT = ("acc1", "acc5", "half_precision", "half_acc1")
_ONE_LINE: tuple[Stack, ...] = (
    ("policy",),
    ("weights",),
    ("precision",),
    ("calibrator",),
    ("quantized_acc1",),
    ("quantized_acc5",),
    ("delta_acc1",),
    ("delta_acc5",),
    ("agreement",),
    ("sqnr_db",),
    ("quantized_ms",),
    ("engine",),
    ("own_precision",),
    ("own_acc1",),
    ("own_ms",),
)
_TWO_LINES: tuple[Stack, ...] = (
    ("policy", "weights", "calibrator"),
    ("quantized_acc1", "quantized_acc5"),
    ("delta_acc1", "delta_acc5"),
    ("agreement", "sqnr_db"),
    ("quantized_ms", "precision"),
    ("engine", "own_precision"),
    ("own_acc1", "own_ms"),
)


def terminal(rows: Sequence[AccuracyRow], notes: Sequence[Footnote], width: int = 100, color: bool = False) -> str:
    """The table and its footnotes for a terminal of `width` columns; with ANSI styles if `color`."""
    said, marks = numbered(notes, len(rows))
    marked = notes_column(rows, marks)
    lines = (*_lines(rows, marked, width, color), *bullets((*legend(rows), *said), width, color))
    return "".join(f"{line}\n" for line in lines)


def _lines(rows: Sequence[AccuracyRow], marked: Column[AccuracyRow], width: int, color: bool) -> Iterator[str]:
    quantized = [row for row in rows if row.quantized]
    shared = [key for key in _HEADING_IF_ALL_THE_SAME if _same(key, quantized)]
    left_out = {*shared, *COLUMN.keys() - {column.key for column in shown(COLUMNS, rows)}}
    notes = shown([marked], quantized)
    layouts = [[*_stacked(layout, left_out), *notes] for layout in (_ONE_LINE, _TWO_LINES)]
    columns = next((one for one in layouts if total(widths_of(one, quantized)) <= width), layouts[-1])
    widths = widths_of(columns, quantized, width)
    for block in _blocks(rows):
        lines = [row for row in block if row.quantized]
        head = (lines or block)[0]
        yield from _heading(head, shared, "" if lines else marked.cell(head), width, color)
        yield from folded(_float_figures(block), width)
        if lines:
            yield from grid(columns, lines, widths, color, rule=True)
        yield ""


def _stacked(layout: Sequence[Stack], left_out: set[str]) -> list[Column[AccuracyRow]]:
    """A layout's columns, those of names foldable: the foremost, and that of engines."""
    stacks = ([COLUMN[key] for key in stack if key not in left_out] for stack in layout)
    first, *others = [_stack(stack) for stack in stacks if stack]
    return [replace(first, fold=True), *(replace(one, fold=one.key == "engine") for one in others)]


def _stack(columns: Sequence[Column[AccuracyRow]]) -> Column[AccuracyRow]:
    """Columns as one, a line for each."""

    def cells(row: AccuracyRow) -> str:
        return "\n".join(column.cell(row) for column in columns)

    title = "\n".join(column.title for column in columns)
    return replace(columns[0], title=title, of=lambda row: True, show=cells)


def _same(key: str, rows: Sequence[AccuracyRow]) -> bool:
    """Whether rows share a cell; a float artifact has no calibrator, which tells nothing of the others."""
    of = [row for row in rows if key != "calibrator" or (row.quantized and not is_float(row.quantized))]
    return len({COLUMN[key].cell(row) for row in of}) == 1


def _blocks(rows: Sequence[AccuracyRow]) -> list[list[AccuracyRow]]:
    """Rows under one heading: of one name, on the same pictures, with the same float accuracy."""
    blocks: dict[tuple[str, ...], list[AccuracyRow]] = {}
    for row in rows:
        key = *(COLUMN[key].cell(row) for key in (*_HEADING, *_FLOAT)), *dataset_key(row.dataset)
        blocks.setdefault(key, []).append(row)
    return list(blocks.values())


def _without(keys: Sequence[str], layout: Sequence[Stack]) -> list[Stack]:
    stacks = (tuple(key for key in stack if key not in keys) for stack in layout)
    return [stack for stack in stacks if stack]


def _heading(row: AccuracyRow, shared: Sequence[str], marks: str, width: int, color: bool) -> list[str]:
    name, *details = ((COLUMN[key].cell(row), _AFTER.get(key, "")) for key in (*_HEADING, *shared))
    said = (f"  {cell}{after}" for cell, after in details if cell != BLANK)
    first, *more = folded(name[0] + "".join(said) + (f"  [{marks}]" if marks else ""), width)
    end = len(name[0]) if first.startswith(name[0]) else len(first)
    return [styled(first[:end], "bold" * color) + first[end:], *more]


def _float_figures(block: Sequence[AccuracyRow]) -> str:
    """Float accuracy, and the float latencies of the block: each of its cards has measured its own."""
    figures = [("float32", *(_titled(key, block) for key in ("acc1", "acc5", "ms")))]
    if half := block[0].half:
        figures.append((half.precision, *(_titled(key, block) for key in ("half_acc1", "half_ms"))))
    return "    ".join("  ".join(words) for words in figures)


def _titled(key: str, block: Sequence[AccuracyRow]) -> str:
    cells = {value: COLUMN[key].cell(row) for row in block if isinstance(value := COLUMN[key].value(row), int | float)}
    ends = dict.fromkeys((cells[min(cells)], cells[max(cells)])) if cells else [BLANK]
    return f"{COLUMN[key].title} {' to '.join(ends)}"
