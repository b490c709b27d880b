"""The columns of the accuracy-delta table.

They are those of FasterTransformer's guide (docs/reference, section 5.3) and what an honest reading of them needs.
Three deltas printed in that guide contradict their own columns; here a delta is always computed.
"""

from collections.abc import Callable, Mapping, Sequence

from swin_quant.report.accuracy.rows import AccuracyRow
from swin_quant.report.column import Column, Value, figure

LEGEND = (
    "agree and SQNR: with float32; ms: of a picture; (H): half precision; (I): quantized, or an artifact on its "
    "engine; Δ = (I) - float32, from unrounded figures; ±: paired standard error (s.e.); ~: within two s.e. of zero, "
    "not distinguishable from no change"
)
WEIGHTS_LEGEND = (
    "float32 and (H): of the float checkpoint that the run began with; PTQ: calibrated only, which QAT started from; "
    "corrected: by passes behind the calibration"
)
OWN_LEGEND = "(E): the fastest float form of the same checkpoint on the same engine"


def _of(result: str, field: str) -> Callable[[AccuracyRow], Value]:
    return lambda row: getattr(getattr(row, result), field, None)


def _delta_with_error(row: AccuracyRow) -> str:
    delta, error = row.delta("acc1"), row.delta_acc1_se
    text = f"{delta:+.3f}" if error is None else f"{delta:+.3f} ±{error:.3f}"
    return f"{text} ~" if row.distinguishable is False else text


def _verdict(row: AccuracyRow) -> str:
    if row.distinguishable is None:
        return ""
    return "dim" if not row.distinguishable else "red" if (row.delta("acc1") or 0) < 0 else "green"


def _resolution(row: AccuracyRow) -> int | None:
    size = row.card.preprocess.get("size")
    return size if type(size) is int else None


COLUMNS: tuple[Column[AccuracyRow], ...] = (
    Column("name", "name", lambda row: row.card.name),
    figure("resolution", "resolution", _resolution, "{0}x{0}"),
    Column("dataset", "dataset", lambda row: row.place),
    Column("policy", "policy", lambda row: row.policy),
    Column("precision", "type", _of("quantized", "precision")),
    Column("weights", "weights", lambda row: row.weights, may_lack=True),
    Column("calibrator", "calibrator", lambda row: row.calibrator),
    figure("pictures", "pictures", lambda row: row.measured[-1].pictures, "{:d}"),
    figure("acc1", "acc@1", _of("float32", "acc1"), "{:.3f}"),
    figure("acc5", "acc@5", _of("float32", "acc5"), "{:.3f}"),
    Column("half_precision", "half (H)", _of("half", "precision")),
    figure("half_acc1", "acc@1(H)", _of("half", "acc1"), "{:.3f}"),
    figure("quantized_acc1", "acc@1(I)", _of("quantized", "acc1"), "{:.3f}"),
    figure("quantized_acc5", "acc@5(I)", _of("quantized", "acc5"), "{:.3f}"),
    Column("delta_acc1", "Δ acc@1", lambda row: row.delta("acc1"), show=_delta_with_error, style=_verdict),
    Column("delta_acc1_se", "", lambda row: row.delta_acc1_se),
    figure("delta_acc5", "Δ acc@5", lambda row: row.delta("acc5"), "{:+.3f}"),
    figure("agreement", "agree %", _of("quantized", "agreement"), "{:.2f}"),
    figure("sqnr_db", "SQNR dB", _of("quantized", "sqnr_db"), "{:.1f}"),
    figure("ms", "ms", _of("float32", "ms_per_picture"), "{:.3f}"),
    figure("half_ms", "ms(H)", _of("half", "ms_per_picture"), "{:.3f}"),
    figure("quantized_ms", "ms(I)", _of("quantized", "ms_per_picture"), "{:.3f}"),
    Column("engine", "engine", _of("quantized", "engine")),
    Column("own_precision", "float (E)", _of("own", "precision"), may_lack=True),
    figure("own_acc1", "acc@1(E)", _of("own", "acc1"), "{:.3f}", may_lack=True),
    figure("own_ms", "ms(E)", _of("own", "ms_per_picture"), "{:.3f}", may_lack=True),
    Column("device", "", lambda row: row.measured[-1].device),
    Column("batch_size", "", lambda row: row.measured[-1].batch_size),
)
COLUMN = {column.key: column for column in COLUMNS}

# What a short table has: these, and of the next ones those in which rows differ; what they share is said once.
SHORT = ("name", "policy", "weights", "acc1", "quantized_acc1", "delta_acc1", "agreement", "ms", "quantized_ms")
SHARED = ("dataset", "pictures", "resolution", "precision", "calibrator", "engine", "device", "batch_size")


def notes_column(rows: Sequence[AccuracyRow], marks: Mapping[int, str]) -> Column[AccuracyRow]:
    """The numbers of the footnotes of each row, by its index."""
    of_row = {id(row): marks[index] for index, row in enumerate(rows) if index in marks}
    return Column("notes", "note", lambda row: of_row.get(id(row)), may_lack=True, blank="", style=lambda row: "dim")


def legend(rows: Sequence[AccuracyRow]) -> list[str]:
    """What the columns of a table mean."""
    more = ((WEIGHTS_LEGEND, any(row.weights for row in rows)), (OWN_LEGEND, any(row.own for row in rows)))
    return [LEGEND, *(text for text, due in more if due)]
