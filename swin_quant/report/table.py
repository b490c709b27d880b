"""The accuracy-delta table: from run cards to rows, and the columns as data.

The columns are those of FasterTransformer's guide (docs/reference, section 5.3) and what an honest reading of
them needs. Three deltas printed in that guide contradict their own columns; here a delta is always computed.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from swin_quant.base.errors import one_line
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import ORIGINAL, PTQ, QAT, UNQUANTIZED, CheckpointRecord, DatasetRecord, Result
from swin_quant.engines.engine import EAGER, HALF_TYPES
from swin_quant.quant.policies import told_apart

BLANK = "-"
LEGEND = (
    "agree and SQNR: with float32; ms: of a picture; (H): half precision; (I): quantized, or an artifact on its "
    "engine; Δ = (I) - float32, from unrounded figures; ±: paired standard error (s.e.); ~: within two s.e. of zero, "
    "not distinguishable from no change"
)
WEIGHTS_LEGEND = (
    "float32 and (H): of the float checkpoint that the run began with; PTQ: calibrated only, which QAT started from"
)
OWN_LEGEND = "(E): the fastest float form of the same checkpoint on the same engine"
Value: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class ReportRow:
    """One quantized result, or one of an artifact on its engine, beside torch's float results on the same pictures.

    `quantized` is None for a data set on which a card has torch's float results only. `own` is the fastest float
    result of the row's engine with the same checkpoint, from whichever card has it. `policy` is what that of
    `quantized` is called beside the others. `others` are float results of torch that no column shows, such as those of
    a second half-precision type.
    """

    card: RunCard
    dataset: DatasetRecord
    float32: Result | None
    half: Result | None
    quantized: Result | None
    own: Result | None = None
    policy: str | None = None
    others: tuple[Result, ...] = ()

    @property
    def measured(self) -> list[Result]:
        """The results that the row shows: float32, half, quantized, without those that there are not."""
        return [result for result in (self.float32, self.half, self.quantized) if result]

    @property
    def place(self) -> str:
        """The data set as people write it: name/split."""
        return one_line(f"{self.dataset['name']}/{self.dataset['split']}")

    @property
    def weights(self) -> str | None:
        """Whose weights the quantized result is of, in words; None where all are the original's."""
        kind = self.quantized.weights if self.quantized else None
        if kind == QAT and self.quantized and is_float(self.quantized):
            return UNQUANTIZED
        return {PTQ: "PTQ", QAT: "QAT"}.get(kind or "")

    @property
    def calibrator(self) -> str | None:
        """The methods that found the ranges, with their percentile where they have one."""
        record = self.card.calibration
        if record is None or self.quantized is None or is_float(self.quantized):
            return None
        return record["method"] if record["percentile"] is None else f"{record['method']} {record['percentile']}"

    def delta(self, field: str) -> float | None:
        """Quantized minus float32, in points, of `acc1` or `acc5`."""
        if self.float32 is None or self.quantized is None:
            return None
        return getattr(self.quantized, field) - getattr(self.float32, field)

    @property
    def stale(self) -> bool:
        """Whether the recorded comparison is not of these two results: its standard error is then not of our delta."""
        delta, recorded = self.delta("acc1"), self.quantized.delta_acc1 if self.quantized else None
        return delta is not None and recorded is not None and abs(delta - recorded) > 1e-6

    @property
    def delta_acc1_se(self) -> float | None:
        """The paired standard error of the top-1 delta, in points."""
        comparable = self.float32 and self.quantized and not self.stale
        return self.quantized.delta_acc1_se if self.quantized and comparable else None

    @property
    def distinguishable(self) -> bool | None:
        """Whether the top-1 delta is more than two standard errors from zero; None if that is not known."""
        delta, error = self.delta("acc1"), self.delta_acc1_se
        return None if delta is None or error is None else abs(delta) > 2 * error


@dataclass(frozen=True)
class Column:
    """One column: its key in CSV and JSON, its title elsewhere (none: CSV and JSON only), its value and how it looks.

    `form` is what str.format makes of the value; only numbers have one. `show` replaces it where a cell is more
    than its value. A column that `may_lack` is left out of tables for people where no row has a value.
    """

    key: str
    title: str
    of: Callable[[ReportRow], Value]
    form: str = ""
    show: Callable[[ReportRow], str] | None = None
    may_lack: bool = False

    def value(self, row: ReportRow) -> Value:
        """What was recorded, unrounded; None if it was not. Text is one printable line."""
        value = self.of(row)
        return one_line(value) if isinstance(value, str) else value

    def cell(self, row: ReportRow) -> str:
        """The value as people read it."""
        value = self.value(row)
        if value is None or value == "":
            return BLANK
        if self.show:
            return self.show(row)
        return self.form.format(value) if self.form else str(value)


def _of(result: str, field: str) -> Callable[[ReportRow], Value]:
    return lambda row: getattr(getattr(row, result), field, None)


def _delta_with_error(row: ReportRow) -> str:
    delta, error = row.delta("acc1"), row.delta_acc1_se
    text = f"{delta:+.3f}" if error is None else f"{delta:+.3f} ±{error:.3f}"
    return f"{text} ~" if row.distinguishable is False else text


def _resolution(row: ReportRow) -> int | None:
    size = row.card.preprocess.get("size")
    return size if type(size) is int else None


COLUMNS = (
    Column("name", "name", lambda row: row.card.name),
    Column("resolution", "resolution", _resolution, "{0}x{0}"),
    Column("dataset", "dataset", lambda row: row.place),
    Column("policy", "policy", lambda row: row.policy),
    Column("precision", "type", _of("quantized", "precision")),
    Column("weights", "weights", lambda row: row.weights, may_lack=True),
    Column("calibrator", "calibrator", lambda row: row.calibrator),
    Column("pictures", "pictures", lambda row: row.measured[-1].pictures, "{:d}"),
    Column("acc1", "acc@1", _of("float32", "acc1"), "{:.3f}"),
    Column("acc5", "acc@5", _of("float32", "acc5"), "{:.3f}"),
    Column("half_precision", "half (H)", _of("half", "precision")),
    Column("half_acc1", "acc@1(H)", _of("half", "acc1"), "{:.3f}"),
    Column("quantized_acc1", "acc@1(I)", _of("quantized", "acc1"), "{:.3f}"),
    Column("quantized_acc5", "acc@5(I)", _of("quantized", "acc5"), "{:.3f}"),
    Column("delta_acc1", "Δ acc@1", lambda row: row.delta("acc1"), show=_delta_with_error),
    Column("delta_acc1_se", "", lambda row: row.delta_acc1_se),
    Column("delta_acc5", "Δ acc@5", lambda row: row.delta("acc5"), "{:+.3f}"),
    Column("agreement", "agree %", _of("quantized", "agreement"), "{:.2f}"),
    Column("sqnr_db", "SQNR dB", _of("quantized", "sqnr_db"), "{:.1f}"),
    Column("ms", "ms", _of("float32", "ms_per_picture"), "{:.3f}"),
    Column("half_ms", "ms(H)", _of("half", "ms_per_picture"), "{:.3f}"),
    Column("quantized_ms", "ms(I)", _of("quantized", "ms_per_picture"), "{:.3f}"),
    Column("engine", "engine", _of("quantized", "engine")),
    Column("own_precision", "float (E)", _of("own", "precision"), may_lack=True),
    Column("own_acc1", "acc@1(E)", _of("own", "acc1"), "{:.3f}", may_lack=True),
    Column("own_ms", "ms(E)", _of("own", "ms_per_picture"), "{:.3f}", may_lack=True),
    Column("device", "", lambda row: row.measured[-1].device),
    Column("batch_size", "", lambda row: row.measured[-1].batch_size),
)


COLUMN = {column.key: column for column in COLUMNS}


def rows_of(cards: Iterable[RunCard]) -> list[ReportRow]:
    """A row for each quantized result and each of an artifact, of each card and data set, in an order of their own."""
    cards = list(cards)
    rows = [row for card in cards for row in _rows_of_card(card)]
    known = {_measurement(row, row.card.checkpoint) for row in rows if row.weights is None}
    rows = [row for row in rows if row.weights != "PTQ" or _measurement(row, _start(row.card)) not in known]
    names, fastest = told_apart(_policy(row) for row in rows), _fastest(rows)
    named = (replace(row, own=_own(row, fastest), policy=names[_policy(row)]) for row in rows)
    return sorted(named, key=_order)


def shown(rows: Sequence[ReportRow]) -> list[Column]:
    """The columns that a table for people has: titled, and with a value somewhere where they may lack one."""
    return [c for c in COLUMNS if c.title and not (c.may_lack and all(c.value(row) is None for row in rows))]


def legend(rows: Sequence[ReportRow]) -> list[str]:
    """What the columns of a table mean."""
    more = ((WEIGHTS_LEGEND, any(row.weights for row in rows)), (OWN_LEGEND, any(row.own for row in rows)))
    return [LEGEND, *(text for text, due in more if due)]


def is_float(result: Result) -> bool:
    """Whether a result is of float32 or half precision."""
    return result.precision == "float32" or result.precision in HALF_TYPES


def dataset_key(dataset: DatasetRecord) -> tuple[str, ...]:
    """What tells one list of pictures from another."""
    return dataset["name"], dataset["split"], str(dataset["sha256"]), str(dataset["pictures"])


def _rows_of_card(card: RunCard) -> Iterable[ReportRow]:
    results: dict[tuple[str, ...], list[Result]] = {}
    for result in card.measured():
        results.setdefault(dataset_key(result.dataset), []).append(result)
    for group in results.values():
        baselines = [result for result in group if _is_baseline(result)]
        baselines.sort(key=lambda result: result.weights is None)
        float32 = next((result for result in baselines if result.precision == "float32"), None)
        half = next((result for result in baselines if result.precision in HALF_TYPES), None)
        others = tuple(result for result in baselines if result not in (float32, half))
        rows: list[Result | None] = [result for result in group if not _is_baseline(result)]
        for quantized in rows or [None]:
            yield ReportRow(card, group[0].dataset, float32, half, quantized, others=others)


def _is_baseline(result: Result) -> bool:
    return is_float(result) and result.engine == EAGER and result.weights in (None, ORIGINAL)


def _measurement(row: ReportRow, record: CheckpointRecord | None) -> tuple[object, ...] | None:
    """What was measured of the checkpoint `record` by the row's quantized result."""
    result = row.quantized
    if result is None or record is None:
        return None
    return record["sha256"], result.engine, result.precision, *_policy(row), dataset_key(row.dataset)


def _start(card: RunCard) -> CheckpointRecord | None:
    return card.training["start"] if card.training else None


def _fastest(rows: Iterable[ReportRow]) -> dict[Hashable, Result]:
    """The fastest float result of each engine, of the same weights on the same pictures."""
    found: dict[Hashable, Result] = {}
    for row in rows:
        if row.quantized and is_float(row.quantized):
            key = _engine_of_weights(row)
            found[key] = min(found.get(key, row.quantized), row.quantized, key=_latency)
    return found


def _own(row: ReportRow, fastest: Mapping[Hashable, Result]) -> Result | None:
    is_quantized = row.quantized is not None and not is_float(row.quantized)
    return fastest.get(_engine_of_weights(row)) if is_quantized else None


def _latency(result: Result) -> tuple[bool, float]:
    return result.ms_per_picture is None, result.ms_per_picture or 0.0


def _engine_of_weights(row: ReportRow) -> Hashable:
    engine = row.quantized.engine if row.quantized else None
    return engine, _weights(row.card), dataset_key(row.dataset)


def _weights(card: RunCard) -> tuple[str, str | None]:
    """Which weights a card is about: those of its calibrated checkpoint, or of the float one."""
    record = card.checkpoint or card.source
    return card.name, record["sha256"] if record else None


def _policy(row: ReportRow) -> tuple[str | None, str | None]:
    """Name and SHA-256 of the policy of a row's quantized result."""
    return (row.quantized.policy, row.quantized.policy_sha256) if row.quantized else (None, None)


def _order(row: ReportRow) -> tuple[str, ...]:
    precision, engine = (row.quantized.precision, row.quantized.engine) if row.quantized else ("", "")
    weights, policy, calibrator = row.weights or "", row.policy or "", row.calibrator or ""
    last = "last" if weights and engine == EAGER else ""  # QAT's weights unquantized, after what they are for
    return (row.card.name, *dataset_key(row.dataset), last, policy, calibrator, precision, weights, engine)
