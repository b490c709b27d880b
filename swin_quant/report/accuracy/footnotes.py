"""Footnotes of the accuracy table. Each rule looks at a row and returns a sentence that readers need, or None.

Rows with the same sentence share a footnote.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swin_quant.base.errors import listed, one_line
from swin_quant.cards.records import Result
from swin_quant.report.accuracy.rows import AccuracyRow, dataset_key
from swin_quant.score.engine import FAKE_QUANT

_UNREADABLE = "unreadable: "  # begins a result's note that names unreadable pictures
_EMULATED = "(emulated)"  # ends the name of an engine that computes as another machine's kernels do
_LONGEST_NOTE = 300


@dataclass(frozen=True)
class Footnote:
    """A sentence, and the indices of its rows."""

    text: str
    rows: tuple[int, ...]
    in_cell: bool = False  # `sim.` in the blocks that people read: it needs no number there


class WholeTable:
    """The facts of all rows, gathered in one pass, and the rules that compare a row with them.

    `baselines`: the float32 accuracies (top-1, top-5) of each float checkpoint on each list of pictures.
    `lists`: the lists of pictures under each name of a data set.
    """

    def __init__(self, rows: Sequence[AccuracyRow]) -> None:
        self.baselines: dict[Hashable, set[tuple[float, float]]] = defaultdict(set)
        self.lists: dict[str, set[Hashable]] = defaultdict(set)
        for row in rows:
            self.lists[row.place].add(dataset_key(row.dataset))
            if row.float32:
                self.baselines[_get_baseline(row)].add((row.float32.acc1, row.float32.acc5))

    def unlike_baselines(self, row: AccuracyRow) -> str | None:
        """A float checkpoint must have one accuracy on the same pictures."""
        source = row.card.original_sha256
        if not row.float32 or not source or len(self.baselines[_get_baseline(row)]) < 2:
            return None
        figures = sorted(self.baselines[_get_baseline(row)])
        each = " and ".join(f"{acc1:.3f} / {acc5:.3f}" for acc1, acc5 in figures)
        return f"inconsistent: float32 of one checkpoint ({source[:12]}) on {row.place} has acc@1 / acc@5 of {each}"

    def unlike_pictures(self, row: AccuracyRow) -> str | None:
        if len(self.lists[row.place]) < 2:
            return None
        return f"{row.place} is not the same list of pictures in all rows: do not compare them"


Rule: TypeAlias = Callable[[AccuracyRow], str | None]


def footnotes(rows: Sequence[AccuracyRow]) -> list[Footnote]:
    """The footnotes of a table: on its figures, on pictures and baselines that differ between rows, and on the runs."""
    found: dict[tuple[str, bool], dict[int, None]] = {}
    table = WholeTable(rows)
    for rule in (*_OF_FIGURES, table.unlike_baselines, table.unlike_pictures, *_OF_RUNS):
        for index, row in enumerate(rows):
            if text := rule(row):
                found.setdefault((one_line(text), rule is _simulated), {})[index] = None
    return [Footnote(text, tuple(indices), in_cell) for (text, in_cell), indices in found.items()]


def numbered(notes: Sequence[Footnote], count: int, in_cells: bool = False) -> tuple[list[str], dict[int, str]]:
    """The sentences below a table of `count` rows, and the numbers of each row's footnotes by its index.

    A sentence about all rows has no number, nor, with `in_cells`, one that its cells tell.
    """
    some = [note for note in notes if len(note.rows) < count and not (in_cells and note.in_cell)]
    marks: dict[int, list[str]] = defaultdict(list)
    for number, note in enumerate(some, 1):
        for index in note.rows:
            marks[index].append(str(number))
    texts = [note.text for note in notes if note not in some]
    texts += [f"[{number}] {note.text}" for number, note in enumerate(some, 1)]
    return texts, {index: " ".join(numbers) for index, numbers in marks.items()}


def is_simulated(engine: str) -> bool:
    """Whether an engine simulates another, so that its latency is the simulation's."""
    return engine == FAKE_QUANT or engine.endswith(_EMULATED)


def _simulated(row: AccuracyRow) -> str | None:
    quantized = row.quantized
    if quantized is None or quantized.ms_per_picture is None or not is_simulated(quantized.engine):
        return None
    return f"the latency of {quantized.engine} is that of a simulation, not of an INT8 engine"


def _settings(row: AccuracyRow) -> str | None:
    timed = [result for result in row.measured if result.ms_per_picture is not None]
    if len({(result.device, result.batch_size) for result in timed}) < 2:
        return None
    each = (f"{result.precision} on {result.device}, batch {result.batch_size}" for result in timed)
    return f"latencies are not comparable: {'; '.join(each)}"


def _untimed(row: AccuracyRow) -> str | None:
    without = [f"{one.precision} on {one.engine}" for one in row.measured if one.ms_per_picture is None]
    return f"not timed: {listed(without)}; `swin-quant evaluate --no-accuracy` times engines" if without else None


def _no_baseline(row: AccuracyRow) -> str | None:
    if row.float32:
        return None
    if row.card.is_qat:
        return (
            f"the float checkpoint that QAT began with was not scored on {row.place}, so there is no delta: give it to "
            "`swin-quant evaluate --float FILE`"
        )
    return f"float32 was not scored on {row.place}, so there is no delta"


def _other_pictures(row: AccuracyRow) -> str | None:
    counts = {result.precision: result.pictures for result in row.measured}
    if len(set(counts.values())) < 2:
        return None
    each = ", ".join(f"{precision} {count}" for precision, count in counts.items())
    return f"not scored on the same number of pictures ({each}): the delta is not of one set of pictures"


def _stale(row: AccuracyRow) -> str | None:
    if not row.stale:
        return None
    return "the recorded paired comparison is not with this float32 result, so the delta has no standard error"


def _unreadable(row: AccuracyRow) -> str | None:
    worst = max(row.measured, key=lambda result: result.unreadable)
    if not worst.unreadable:
        return None
    pictures = f"{worst.unreadable} unreadable picture{'s' if worst.unreadable > 1 else ''} of {row.place} left out"
    return f"{pictures}: {_note(worst).removeprefix(_UNREADABLE)}" if _names_unreadable(worst) else pictures


def _remark(row: AccuracyRow) -> str | None:
    remarks = dict.fromkeys(_note(result) for result in row.measured if result.note and not _names_unreadable(result))
    return "; ".join(remarks) or None


def _unlike_its_checkpoint(row: AccuracyRow) -> str | None:
    """The figures of a verification that failed."""
    texts = []
    for record in row.verification:
        agreed = "" if record["agreement"] is None else f", top-1 agreement {record['agreement']:.1f} %"
        beside = f"{record['reference']} on {record['pictures']} pictures is {record['mean']:.2g} "
        far = f"(max {record['max']:.2g}{agreed}), more than {record['tolerance']:g}"
        texts += [] if record["passed"] else [f"mean |Δlogit| against {beside}{far}"]
    return f"NOT verified: {'; '.join(texts)}" if texts else None


def _dead_nodes(row: AccuracyRow) -> str | None:
    dead = row.card.calibration["dead_nodes"] if row.card.calibration and row.quantized else []
    if not dead:
        return None
    return f"{len(dead)} dead node{'s' if len(dead) > 1 else ''} (only zeros seen in calibration): {listed(dead, 3)}"


def _get_baseline(row: AccuracyRow) -> Hashable:
    return row.card.original_sha256, dataset_key(row.dataset)


def _names_unreadable(result: Result) -> bool:
    return result.unreadable > 0 and _note(result).startswith(_UNREADABLE)


def _note(result: Result) -> str:
    note = result.note or ""
    return note if len(note) <= _LONGEST_NOTE else note[:_LONGEST_NOTE] + " ..."


_OF_FIGURES: tuple[Rule, ...] = (_simulated, _settings, _untimed, _no_baseline, _other_pictures, _stale)
_OF_RUNS: tuple[Rule, ...] = (_unreadable, _unlike_its_checkpoint, _dead_nodes, _remark)
