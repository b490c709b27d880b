"""The table for a terminal: a heading with what rows share, the float figures among it, then a line for each row.

Figures are never cut or folded. Where the width is short, columns are stacked; a terminal too narrow even for that
wraps lines, which loses nothing.
"""

import io
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swin_quant.report.footnotes import Footnote, attributed
from swin_quant.report.table import BLANK, COLUMN, ReportRow, dataset_key, is_float, legend, shown

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
_GAP = 2
_NARROWEST_NAME = 10


def terminal(rows: Sequence[ReportRow], notes: Sequence[Footnote], width: int = 100, color: bool = False) -> str:
    """The table and its footnotes for a terminal of `width` columns; with ANSI styles if `color`."""
    quantized = [row for row in rows if row.quantized]
    shared = [key for key in _HEADING_IF_ALL_THE_SAME if _same(key, quantized)]
    lacking = COLUMN.keys() - {column.key for column in shown(rows)}
    layouts = [_without([*shared, *lacking], layout) for layout in (_ONE_LINE, _TWO_LINES)]
    stacks = next((stacks for stacks in layouts if _total(_widths(quantized, stacks)) <= width), layouts[-1])
    widths = _widths(quantized, stacks)
    widths[0] = max(min(widths[0], _NARROWEST_NAME), widths[0] - max(0, _total(widths) - width))

    output = io.StringIO()
    room = max(width, _total(widths))
    console = Console(file=output, width=room, force_terminal=color, legacy_windows=False, highlight=False)
    for block in _blocks(rows):
        lines = [row for row in block if row.quantized]
        console.print(_heading((lines or block)[0], shared), width=width)
        console.print(_float_figures(block), width=width)
        if lines:
            console.print(_table(lines, stacks, widths))
        console.print()
    console.print(_footer([*legend(rows), *attributed(notes, rows)]), width=width)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def _same(key: str, rows: Sequence[ReportRow]) -> bool:
    """Whether rows share a cell; a float artifact has no calibrator, which tells nothing of the others."""
    of = [row for row in rows if key != "calibrator" or (row.quantized and not is_float(row.quantized))]
    return len({COLUMN[key].cell(row) for row in of}) == 1


def _blocks(rows: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """Rows under one heading: of one name, on the same pictures, with the same float accuracy."""
    blocks: dict[tuple[str, ...], list[ReportRow]] = {}
    for row in rows:
        key = *(COLUMN[key].cell(row) for key in (*_HEADING, *_FLOAT)), *dataset_key(row.dataset)
        blocks.setdefault(key, []).append(row)
    return list(blocks.values())


def _without(keys: Sequence[str], layout: Sequence[Stack]) -> list[Stack]:
    stacks = (tuple(key for key in stack if key not in keys) for stack in layout)
    return [stack for stack in stacks if stack]


def _widths(rows: Sequence[ReportRow], stacks: Sequence[Stack]) -> list[int]:
    """What each stack needs, the same in every block."""
    texts = ([text for key in stack for text in (COLUMN[key].title, *map(COLUMN[key].cell, rows))] for stack in stacks)
    return [max(map(cell_len, column)) for column in texts]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _heading(row: ReportRow, shared: Sequence[str]) -> Text:
    name, *details = ((COLUMN[key].cell(row), _AFTER.get(key, "")) for key in (*_HEADING, *shared))
    said = (f"  {cell}{after}" for cell, after in details if cell != BLANK)
    return Text.assemble((name[0], "bold"), *said, overflow="fold")


def _float_figures(block: Sequence[ReportRow]) -> Text:
    """Float accuracy, and the float latencies of the block: each of its cards has measured its own."""
    shown = [("float32", *(_titled(key, block) for key in ("acc1", "acc5", "ms")))]
    if half := block[0].half:
        shown.append((half.precision, *(_titled(key, block) for key in ("half_acc1", "half_ms"))))
    return Text("    ".join("  ".join(figures) for figures in shown))


def _titled(key: str, block: Sequence[ReportRow]) -> str:
    cells = {value: COLUMN[key].cell(row) for row in block if isinstance(value := COLUMN[key].value(row), int | float)}
    ends = dict.fromkeys((cells[min(cells)], cells[max(cells)])) if cells else [BLANK]
    return f"{COLUMN[key].title} {' to '.join(ends)}"


def _table(rows: Sequence[ReportRow], stacks: Sequence[Stack], widths: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for stack, width in zip(stacks, widths, strict=True):
        numeric = bool(COLUMN[stack[0]].form)
        title = Text("\n".join(COLUMN[key].title for key in stack))
        table.add_column(title, justify="right" if numeric else "left", width=width, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row, stack) for stack in stacks))
    return table


def _cell(row: ReportRow, stack: Stack) -> Text:
    style = ""
    if stack[0] == "delta_acc1" and row.distinguishable is not None:
        style = "dim" if not row.distinguishable else "red" if (row.delta("acc1") or 0) < 0 else "green"
    return Text("\n".join(COLUMN[key].cell(row) for key in stack), style=style)


def _footer(sentences: Iterable[str]) -> Table:
    footer = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        footer.add_row("*", Text(sentence, overflow="fold"), style="dim")
    return footer
