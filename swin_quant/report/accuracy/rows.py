"""Rows, columns and footnotes of the accuracy-delta table, made from run cards.

The columns are those of FasterTransformer's guide (docs/reference, section 5.3), and more that an honest reading needs.
Three deltas printed in that guide contradict their own columns; here a delta is always computed. Footnotes are
sentences that readers of a row need; rows with the same sentence share one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from swin_quant.base.errors import listed, one_line
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import (
    CORRECTED,
    ORIGINAL,
    PTQ,
    QAT,
    UNQUANTIZED,
    CheckpointRecord,
    DatasetRecord,
    Result,
    VerificationRecord,
)
from swin_quant.quant.policy import told_apart
from swin_quant.report.table import Column, Value, field
from swin_quant.score.engine import EAGER, FAKE_QUANT, HALF_TYPES, is_float


@dataclass(frozen=True)
class AccuracyRow:
    """One result, quantized or of an artifact on its engine, beside torch's float results on the same pictures.

    `quantized`: None if a card has only torch's float results on a data set. `own`: the fastest float result of the
    row's engine with the same checkpoint, from any of the cards. `policy`: the name of the policy of `quantized`,
    unique among the rows. `others`: torch's float results that no column shows, e.g. a second half-precision type.
    `marks`: the numbers of its footnotes.
    """

    card: RunCard
    dataset: DatasetRecord
    float32: Result | None
    half: Result | None
    quantized: Result | None
    own: Result | None = None
    policy: str | None = None
    others: tuple[Result, ...] = ()
    marks: str = ""

    @property
    def result(self) -> Result:
        """`quantized`, of a row that has one."""
        assert self.quantized is not None, "the row has no result"
        return self.quantized

    @property
    def is_quantized(self) -> bool:
        """Whether `quantized` is there and no float."""
        return self.quantized is not None and not is_float(self.quantized.precision)

    @property
    def is_baseline(self) -> bool:
        """Whether it is the float32 that deltas are against."""
        return self.float32 is not None and self.quantized == self.float32

    @property
    def called(self) -> str:
        """The weights, the type, the policy, and the numbers of its footnotes."""
        if self.weights and self.weights in UNQUANTIZED.values():
            return f"{self.weights.partition(' ')[0]} {self.result.precision}"
        policy, precision = self.policy or "", self.result.precision
        if policy.replace(" ", "").upper().endswith(precision):  # "w4a4" and "qdq W4 A4" say the bits again
            policy = policy.partition(" W")[0] if " W" in policy else ""
        words = (self.weights, precision, policy, f"[{self.marks}]" if self.marks else None)
        return " ".join(filter(None, words))

    @property
    def measured(self) -> list[Result]:
        """The results that the row has among float32, half, quantized."""
        return [result for result in (self.float32, self.half, self.quantized) if result]

    @property
    def place(self) -> str:
        """The data set as people write it."""
        return dataset_name(self.dataset)

    @property
    def weights(self) -> str | None:
        """The weights of the quantized result in words: PTQ or QAT; None for the original's."""
        kind = self.quantized.weights if self.quantized else None
        if kind in UNQUANTIZED and self.quantized and is_float(self.quantized.precision):
            return UNQUANTIZED[kind]
        return {PTQ: "PTQ" if self.card.is_qat else CORRECTED, QAT: "QAT"}.get(kind or "")

    @property
    def calibrator(self) -> str | None:
        """The methods that found the ranges, each with its percentile if it has one."""
        if self.card.calibration is None or not self.is_quantized:
            return None
        if self.result.calibrator:
            return self.result.calibrator
        ranges = self.card.training.get("ranges") if self.card.training else None
        if ranges and ranges["activations"] and self.result.weights != PTQ:
            return ranges["activations"]
        return self.calibrated_by

    @property
    def calibrated_by(self) -> str | None:
        """The method of the card's calibration, with its percentile if it has one."""
        record = self.card.calibration
        if record is None or record["percentile"] is None:
            return record and record["method"]
        return f"{record['method']} {record['percentile']}"

    @property
    def verified(self) -> str | None:
        """Whether the row's engine kept the tolerance of `verify`: yes, NO; None where there was nothing to keep."""
        passed = [record["passed"] for record in self.verification]
        return None if not passed else "yes" if all(passed) else "NO"

    @property
    def verification(self) -> list[VerificationRecord]:
        """The comparisons of the row's engine with its checkpoint that had a tolerance to pass."""
        identity = self.quantized and (self.quantized.engine, self.quantized.precision, self.quantized.policy)
        return [
            record
            for record in self.card.verification
            if None not in (record["tolerance"], record["passed"])
            and (record["engine"], record["precision"], record["policy"]) == identity
        ]

    def delta(self, metric: str) -> float | None:
        """Quantized minus float32, in points, of `acc1` or `acc5`."""
        if self.float32 is None or self.quantized is None:
            return None
        return getattr(self.quantized, metric) - getattr(self.float32, metric)

    @property
    def is_stale(self) -> bool:
        """Whether the recorded comparison is with another float result: its standard error is not our delta's then."""
        delta, recorded = self.delta("acc1"), self.quantized.delta_acc1 if self.quantized else None
        return delta is not None and recorded is not None and abs(delta - recorded) > 1e-6

    @property
    def delta_acc1_se(self) -> float | None:
        """The paired standard error of the top-1 delta, in points."""
        return self.quantized.delta_acc1_se if self.float32 and self.quantized and not self.is_stale else None

    @property
    def distinguishable(self) -> bool | None:
        """Whether the top-1 delta is more than two standard errors from zero; None if that is unknown."""
        delta, error = self.delta("acc1"), self.delta_acc1_se
        return None if delta is None or error is None else abs(delta) > 2 * error


def list_rows(cards: Iterable[RunCard]) -> list[AccuracyRow]:
    """A row for each result, card and data set, in the order of the cards.

    The result of a PTQ checkpoint stands in its own card and in the card of the QAT that began with it: it has one row.
    """
    rows = [row for card in cards for row in _list_card_rows(card)]
    known = {_measurement(row, row.card.checkpoint) for row in rows if row.weights is None}
    # The unchanged checkpoint that QAT started from, with its own ranges
    ptq = {id(row) for row in rows if row.weights == "PTQ" and row.result.calibrator is None}
    rows = [row for row in rows if id(row) not in ptq or _measurement(row, row.card.start) not in known]
    names = told_apart(policy for row in rows if (policy := _policy(row)))
    fastest: dict[Hashable, Result] = {}  # float result of each engine, with the same weights on the same pictures
    keys = [(row.quantized and row.quantized.engine, row.card.name, row.card.weights_sha256,
             dataset_key(row.dataset)) for row in rows]  # fmt: skip
    for row, key in zip(rows, keys, strict=True):
        if row.quantized and is_float(row.quantized.precision):
            fastest[key] = min(fastest.get(key, row.quantized), row.quantized, key=latency)
    called = {None: None} | names
    own = (fastest.get(key) if row.is_quantized else None for row, key in zip(rows, keys, strict=True))
    return [replace(row, own=one, policy=called[_policy(row)]) for row, one in zip(rows, own, strict=True)]


def dataset_name(dataset: DatasetRecord) -> str:
    """A data set as people write it: name/split, or the name alone."""
    return one_line("/".join(filter(None, (dataset["name"], dataset["split"]))))


def dataset_key(dataset: DatasetRecord) -> tuple[str, ...]:
    """The identity of a list of pictures."""
    return dataset["name"], dataset["split"], str(dataset["sha256"]), str(dataset["pictures"])


def _list_card_rows(card: RunCard) -> Iterable[AccuracyRow]:
    results: dict[tuple[str, ...], list[Result]] = {}
    for result in card.measured():
        results.setdefault(dataset_key(result.dataset), []).append(result)
    for group in results.values():
        floats = (one for one in group if is_float(one.precision) and one.engine == EAGER)
        baselines = [one for one in floats if one.weights in (None, ORIGINAL)]
        rows: list[Result | None] = [result for result in group if result not in baselines]
        baselines.sort(key=lambda result: result.weights is None)
        float32 = next((result for result in baselines if result.precision == "float32"), None)
        half = next((result for result in baselines if result.precision in HALF_TYPES), None)
        others = tuple(result for result in baselines if result not in (float32, half))
        made = (AccuracyRow(card, group[0].dataset, float32, half, one, others=others) for one in rows or [None])
        # QAT's weights without quantization come last
        yield from sorted(made, key=lambda row: bool(row.weights and row.quantized and row.quantized.engine == EAGER))


def _measurement(row: AccuracyRow, record: CheckpointRecord | None) -> tuple[object, ...] | None:
    """The identity of the row's quantized result, if it was measured with the checkpoint `record`."""
    result = row.quantized
    if result is None or record is None:
        return None
    return record["sha256"], result.engine, result.precision, _policy(row), dataset_key(row.dataset)


def latency(result: Result) -> tuple[bool, float]:
    """A key by which the fastest comes first, and a result that was not timed last."""
    return result.ms_per_picture is None, result.ms_per_picture or 0.0


def _policy(row: AccuracyRow) -> tuple[str, str | None] | None:
    """Name and SHA-256 of the policy of a row's quantized result."""
    result = row.quantized
    return None if result is None or result.policy is None else (result.policy, result.policy_sha256)


def delta_with_error(row: AccuracyRow) -> str:
    """The top-1 delta with its standard error, and ~ where it is within two of zero."""
    delta, error = row.delta("acc1") or 0.0, row.delta_acc1_se
    text = f"{delta:+.2f}" if error is None else f"{delta:+.2f} ±{error:.2f}"
    return f"{text} ~" if row.distinguishable is False else text


def delta_style(row: AccuracyRow) -> str:
    """Dim where the top-1 delta is indistinguishable from zero, else red for a loss, green for a gain."""
    if row.distinguishable is None:
        return ""
    return "dim" if not row.distinguishable else "red" if (row.delta("acc1") or 0) < 0 else "green"


def get_resolution(row: AccuracyRow) -> int | str | None:
    """The side of square pictures; height and width of oblong ones as 192x224."""
    size = row.card.preprocess.get("size")
    return "x".join(map(str, size)) if isinstance(size, list) else size if type(size) is int else None


_VALUES: dict[str, Callable[[AccuracyRow], Value]] = {
    "name": field("card", "name"),
    "resolution": get_resolution,
    "dataset": field("place"),
    "policy": field("policy"),
    "precision": field("quantized", "precision"),
    "weights": field("weights"),
    "calibrator": field("calibrator"),
    "pictures": lambda row: row.measured[-1].pictures,
    "acc1": field("float32", "acc1"),
    "acc5": field("float32", "acc5"),
    "half_precision": field("half", "precision"),
    "half_acc1": field("half", "acc1"),
    "quantized_acc1": field("quantized", "acc1"),
    "quantized_acc5": field("quantized", "acc5"),
    "delta_acc1": lambda row: row.delta("acc1"),
    "delta_acc1_se": field("delta_acc1_se"),
    "delta_acc5": lambda row: row.delta("acc5"),
    "agreement": field("quantized", "agreement"),
    "sqnr_db": field("quantized", "sqnr_db"),
    "ms": field("float32", "ms_per_picture"),
    "half_ms": field("half", "ms_per_picture"),
    "quantized_ms": field("quantized", "ms_per_picture"),
    "engine": field("quantized", "engine"),
    "own_precision": field("own", "precision"),
    "own_acc1": field("own", "acc1"),
    "own_ms": field("own", "ms_per_picture"),
    "verified": field("verified"),
    "device": lambda row: row.measured[-1].device,
    "batch_size": lambda row: row.measured[-1].batch_size,
}
COLUMNS = [Column(key, "", value) for key, value in _VALUES.items()]  # for programs


_UNREADABLE = "unreadable: "  # begins a result's note that names unreadable pictures
_EMULATED = "(emulated)"  # ends the name of an engine that computes as another machine's kernels do
_LONGEST_NOTE = 300
_SIMULATED, _BETWEEN_TABLES = 0, 7  # the places of two notes in their list


@dataclass(frozen=True)
class Footnote:
    """A sentence, and the indices of its rows."""

    text: str
    rows: tuple[int, ...]
    in_blocks: bool = False  # the blocks that people read show which rows it is about: it needs no number there


def footnotes(rows: Sequence[AccuracyRow]) -> list[Footnote]:
    """The footnotes of a table: on its figures, on pictures and baselines that differ between rows, and on the runs."""
    baselines: dict[Hashable, set[tuple[float, float]]] = defaultdict(set)  # of each float checkpoint on its pictures
    lists: dict[str, set[Hashable]] = defaultdict(set)  # of pictures, under each name of a data set
    for row in rows:
        lists[row.place].add(dataset_key(row.dataset))
        if row.float32:
            baselines[_scored(row)].add((row.float32.acc1, row.float32.acc5))
    found: dict[tuple[int, str], dict[int, None]] = {}
    for index, row in enumerate(rows):
        source = row.card.original_sha256
        accuracies = sorted(baselines[_scored(row)]) if row.float32 and source else []
        notes = [*_describe_figures(row), *_describe_run(row)]
        if source and len(accuracies) > 1:
            each = " and ".join(f"{acc1:.3f} / {acc5:.3f}" for acc1, acc5 in accuracies)
            text = f"float32 of one checkpoint ({source[:12]}) on {row.place} has acc@1 / acc@5 of {each}"
            notes.append((6, f"inconsistent: {text}"))
        if len(lists[row.place]) > 1:
            notes.append((_BETWEEN_TABLES, f"not all on {row.place} have the same pictures: compare within one table"))
        for place, text in notes:
            found.setdefault((place, one_line(text)), {})[index] = None
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return [
        Footnote(text, tuple(indices), place in (_SIMULATED, _BETWEEN_TABLES)) for (place, text), indices in ordered
    ]


def _scored(row: AccuracyRow) -> Hashable:
    """The float weights, the list of pictures, and how these are prepared."""
    return row.card.original_sha256, dataset_key(row.dataset), repr(row.card.preprocess)


def _describe_figures(row: AccuracyRow) -> Iterator[tuple[int, str]]:
    """The notes on a row's figures, each with its place in the list."""
    quantized, timed = row.quantized, [result for result in row.measured if result.ms_per_picture is not None]
    if quantized in timed and quantized and is_simulated(quantized.engine):
        yield _SIMULATED, f"the latency of {quantized.engine} is that of a simulation, not of an INT8 engine"
    if len({(result.device, result.batch_size) for result in timed}) > 1:
        each = (f"{result.precision} on {result.device}, batch {result.batch_size}" for result in timed)
        yield 1, f"latencies are not comparable: {'; '.join(each)}"
    if untimed := [f"{one.precision} on {one.engine}" for one in row.measured if one.ms_per_picture is None]:
        yield 2, f"not timed: {listed(untimed)}; `swin-quant evaluate --no-accuracy` times engines"
    if not row.float32:
        what = "the float checkpoint that QAT began with" if row.card.is_qat else "float32"
        remedy = ": give it to `swin-quant evaluate --float FILE`" if row.card.is_qat else ""
        yield 3, f"{what} was not scored on {row.place}, so there is no delta{remedy}"
    counts = {result.precision: result.pictures for result in row.measured}
    if len(set(counts.values())) > 1:
        figures = ", ".join(f"{precision} {count}" for precision, count in counts.items())
        yield 4, f"not scored on the same number of pictures ({figures}): the delta is not of one set of pictures"
    if row.is_stale:
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
        far = f"(max {record['max']:.2g}{agreed}), more than {record['tolerance']:.3g}"
        failed += [] if record["passed"] else [f"mean |Δlogit| against {beside}{far}"]
    if failed:
        yield 9, f"NOT verified: {'; '.join(failed)}"
    dead = row.card.calibration["dead_nodes"] if row.card.calibration and row.quantized else []
    if dead:
        what = f"dead node{'s' if len(dead) > 1 else ''} (only zeros seen in calibration)"
        yield 10, f"{len(dead)} {what}: {listed(dead, 3)}"
    remarks = dict.fromkeys(notes[id(one)] for one in row.measured if one.note and one not in named)
    if remarks:
        yield 11, "; ".join(remarks)


def numbered(notes: Sequence[Footnote], count: int, in_blocks: bool = False) -> tuple[list[str], dict[int, str]]:
    """The sentences below a table of `count` rows, and the numbers of each row's footnotes by its index.

    A sentence about all rows has no number, nor one that the blocks tell, with `in_blocks`.
    """
    some = [note for note in notes if len(note.rows) < count and not (in_blocks and note.in_blocks)]
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
