"""The rows of the accuracy-delta table, from run cards."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from swin_quant.base.errors import one_line
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CORRECTED, ORIGINAL, PTQ, QAT, UNQUANTIZED, CheckpointRecord, DatasetRecord, Result
from swin_quant.quant.policies import told_apart
from swin_quant.score.engine import EAGER, HALF_TYPES


@dataclass(frozen=True)
class AccuracyRow:
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
        if kind in UNQUANTIZED and self.quantized and is_float(self.quantized):
            return UNQUANTIZED[kind]
        return {PTQ: "PTQ" if self.card.is_qat else CORRECTED, QAT: "QAT"}.get(kind or "")

    @property
    def calibrator(self) -> str | None:
        """The methods that found the ranges, with their percentile where they have one."""
        record = self.card.calibration
        if record is None or self.quantized is None or is_float(self.quantized):
            return None
        if self.quantized.calibrator:
            return self.quantized.calibrator
        ranges = self.card.training.get("ranges") if self.card.training else None
        if ranges and ranges["activations"] and self.quantized.weights != PTQ:
            return ranges["activations"]
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


def rows_of(cards: Iterable[RunCard]) -> list[AccuracyRow]:
    """A row for each quantized result and each of an artifact, of each card and data set, in the order of the cards."""
    cards = list(cards)
    rows = [row for card in cards for row in _rows_of_card(card)]
    known = {_measurement(row, row.card.checkpoint) for row in rows if row.weights is None}
    rows = [row for row in rows if not _is_ptq(row) or _measurement(row, _start(row.card)) not in known]
    names, fastest = told_apart(policy for row in rows if (policy := _policy(row))), _fastest(rows)
    called = {None: None} | names
    return [replace(row, own=_own(row, fastest), policy=called[_policy(row)]) for row in rows]


def is_float(result: Result) -> bool:
    """Whether a result is of float32 or half precision."""
    return result.precision == "float32" or result.precision in HALF_TYPES


def dataset_key(dataset: DatasetRecord) -> tuple[str, ...]:
    """What tells one list of pictures from another."""
    return dataset["name"], dataset["split"], str(dataset["sha256"]), str(dataset["pictures"])


def _rows_of_card(card: RunCard) -> Iterable[AccuracyRow]:
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
        made = (AccuracyRow(card, group[0].dataset, float32, half, one, others=others) for one in rows or [None])
        yield from sorted(made, key=_is_last)


def _is_baseline(result: Result) -> bool:
    return is_float(result) and result.engine == EAGER and result.weights in (None, ORIGINAL)


def _measurement(row: AccuracyRow, record: CheckpointRecord | None) -> tuple[object, ...] | None:
    """What was measured of the checkpoint `record` by the row's quantized result."""
    result = row.quantized
    if result is None or record is None:
        return None
    return record["sha256"], result.engine, result.precision, _policy(row), dataset_key(row.dataset)


def _is_ptq(row: AccuracyRow) -> bool:
    """Whether a row is of the very checkpoint that QAT started from, with its own ranges."""
    return row.weights == "PTQ" and row.quantized is not None and row.quantized.calibrator is None


def _start(card: RunCard) -> CheckpointRecord | None:
    return card.training["start"] if card.training else None


def _fastest(rows: Iterable[AccuracyRow]) -> dict[Hashable, Result]:
    """The fastest float result of each engine, of the same weights on the same pictures."""
    found: dict[Hashable, Result] = {}
    for row in rows:
        if row.quantized and is_float(row.quantized):
            key = _engine_of_weights(row)
            found[key] = min(found.get(key, row.quantized), row.quantized, key=_latency)
    return found


def _own(row: AccuracyRow, fastest: Mapping[Hashable, Result]) -> Result | None:
    is_quantized = row.quantized is not None and not is_float(row.quantized)
    return fastest.get(_engine_of_weights(row)) if is_quantized else None


def _latency(result: Result) -> tuple[bool, float]:
    return result.ms_per_picture is None, result.ms_per_picture or 0.0


def _engine_of_weights(row: AccuracyRow) -> Hashable:
    engine = row.quantized.engine if row.quantized else None
    return engine, _weights(row.card), dataset_key(row.dataset)


def _weights(card: RunCard) -> tuple[str, str | None]:
    """Which weights a card is about: those of its calibrated checkpoint, or of the float one."""
    record = card.checkpoint or card.source
    return card.name, record["sha256"] if record else None


def _policy(row: AccuracyRow) -> tuple[str, str | None] | None:
    """Name and SHA-256 of the policy of a row's quantized result."""
    result = row.quantized
    return None if result is None or result.policy is None else (result.policy, result.policy_sha256)


def _is_last(row: AccuracyRow) -> bool:
    """QAT's weights unquantized come after what they are for."""
    return bool(row.weights and row.quantized and row.quantized.engine == EAGER)
