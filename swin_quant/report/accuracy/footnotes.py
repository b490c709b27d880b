"""Footnotes of the accuracy table: sentences that readers of a row need. Rows with the same sentence share one."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from swin_quant.base.errors import listed, one_line
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


def footnotes(rows: Sequence[AccuracyRow]) -> list[Footnote]:
    """The footnotes of a table: on its figures, on pictures and baselines that differ between rows, and on the runs."""
    baselines: dict[Hashable, set[tuple[float, float]]] = defaultdict(set)  # of each float checkpoint on its pictures
    lists: dict[str, set[Hashable]] = defaultdict(set)  # of pictures, under each name of a data set
    for row in rows:
        lists[row.place].add(dataset_key(row.dataset))
        if row.float32:
            baselines[row.card.original_sha256, dataset_key(row.dataset)].add((row.float32.acc1, row.float32.acc5))
    found: dict[tuple[int, str], dict[int, None]] = {}
    for index, row in enumerate(rows):
        source = row.card.original_sha256
        accuracies = sorted(baselines[source, dataset_key(row.dataset)]) if row.float32 and source else []
        notes = [*_describe_figures(row), *_describe_run(row)]
        if source and len(accuracies) > 1:
            each = " and ".join(f"{acc1:.3f} / {acc5:.3f}" for acc1, acc5 in accuracies)
            text = f"float32 of one checkpoint ({source[:12]}) on {row.place} has acc@1 / acc@5 of {each}"
            notes.append((6, f"inconsistent: {text}"))
        if len(lists[row.place]) > 1:
            notes.append((7, f"{row.place} is not the same list of pictures in all rows: do not compare them"))
        for place, text in notes:
            found.setdefault((place, one_line(text)), {})[index] = None
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return [Footnote(text, tuple(indices), in_cell=place == 0) for (place, text), indices in ordered]


def _describe_figures(row: AccuracyRow) -> Iterator[tuple[int, str]]:
    """The notes on a row's figures, each with its place in the list."""
    quantized, timed = row.quantized, [result for result in row.measured if result.ms_per_picture is not None]
    if quantized in timed and quantized and is_simulated(quantized.engine):
        yield 0, f"the latency of {quantized.engine} is that of a simulation, not of an INT8 engine"
    if len({(result.device, result.batch_size) for result in timed}) > 1:
        each = (f"{result.precision} on {result.device}, batch {result.batch_size}" for result in timed)
        yield 1, f"latencies are not comparable: {'; '.join(each)}"
    if untimed := [f"{one.precision} on {one.engine}" for one in row.measured if one.ms_per_picture is None]:
        yield 2, f"not timed: {listed(untimed)}; `swin-quant evaluate --no-accuracy` times engines"
    if not row.float32 and row.card.is_qat:
        yield (
            3,
            f"the float checkpoint that QAT began with was not scored on {row.place}, so there is no delta: give it to "
            "`swin-quant evaluate --float FILE`",
        )
    elif not row.float32:
        yield 3, f"float32 was not scored on {row.place}, so there is no delta"
    counts = {result.precision: result.pictures for result in row.measured}
    if len(set(counts.values())) > 1:
        figures = ", ".join(f"{precision} {count}" for precision, count in counts.items())
        yield 4, f"not scored on the same number of pictures ({figures}): the delta is not of one set of pictures"
    if row.stale:
        yield 5, "the recorded paired comparison is not with this float32 result, so the delta has no standard error"


def _describe_run(row: AccuracyRow) -> Iterator[tuple[int, str]]:
    """The notes on a row's pictures, verification and calibration, each with its place in the list."""
    texts = {id(result): result.note or "" for result in row.measured}
    notes = {one: text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]} ..." for one, text in texts.items()}
    named = [one for one in row.measured if one.unreadable > 0 and notes[id(one)].startswith(_UNREADABLE)]
    worst = max(row.measured, key=lambda result: result.unreadable)
    if worst.unreadable:
        count = f"{worst.unreadable} unreadable picture{'s' if worst.unreadable > 1 else ''} of {row.place} left out"
        yield 8, f"{count}: {notes[id(worst)].removeprefix(_UNREADABLE)}" if worst in named else count
    failed = []
    for record in row.verification:
        agreed = "" if record["agreement"] is None else f", top-1 agreement {record['agreement']:.1f} %"
        beside = f"{record['reference']} on {record['pictures']} pictures is {record['mean']:.2g} "
        far = f"(max {record['max']:.2g}{agreed}), more than {record['tolerance']:g}"
        failed += [] if record["passed"] else [f"mean |Δlogit| against {beside}{far}"]
    if failed:
        yield 9, f"NOT verified: {'; '.join(failed)}"
    dead = row.card.calibration["dead_nodes"] if row.card.calibration and row.quantized else []
    if dead:
        yield (
            10,
            f"{len(dead)} dead node{'s' if len(dead) > 1 else ''} (only zeros seen in calibration): {listed(dead, 3)}",
        )
    remarks = dict.fromkeys(notes[id(one)] for one in row.measured if one.note and one not in named)
    if remarks:
        yield 11, "; ".join(remarks)


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
