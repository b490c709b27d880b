"""The records of a run card: their annotations are its schema."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from swin_quant.base.schema import Must, within
from swin_quant.cards.paths import is_bare_name


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False


NAMES = "at most 100,000 printable names of at most 300 characters"


def are_names(names: list[str]) -> bool:
    """Whether a list can be class names."""
    return len(names) <= 100_000 and all(0 < len(name) <= 300 and name.isprintable() for name in names)


Sha256 = Annotated[str, Must(re.compile("[0-9a-f]{64}").fullmatch, "64 hexadecimal digits")]
FileName = Annotated[str, Must(is_bare_name, "fit for a file name, without folders")]
ClassNames = Annotated[list[str], Must(are_names, NAMES)]
Moment = Annotated[str, Must(_is_date, "an ISO date and time")]

TypeName = Literal["float32", "int64", "int32", "bool"]  # of an input

ORIGINAL, PTQ, QAT = "original", "ptq", "qat"  # the weights that a result was measured with

# Notes on results of such weights with the nodes off, which are no baseline.
UNQUANTIZED = {QAT: "QAT weights, unquantized", PTQ: "corrected weights, unquantized"}
CORRECTED = "corrected"  # weights that a pass changed after calibration


class CheckpointRecord(TypedDict):
    """A checkpoint: the one beside the card, or that of an artifact, or what training started from.

    `path`: where the file was, from the folder of the card; absolute while the card is in memory (`located`)."""

    file: FileName
    sha256: Sha256
    path: NotRequired[str]


class SourceRecord(CheckpointRecord):
    """The float checkpoint that a run began with. `weights`: the set that was taken, of a file that holds several."""

    format: str
    weights: NotRequired[str]


class CheckRecord(TypedDict):
    """The calibrated model under `policy` beside itself in float, on some of the calibration pictures.

    `agreement` (top-1) in percent, SQNR of the logits in dB (None if equal); `others` is that SQNR by other methods,
    where they were tried; the ranges of the nodes `at_fault` lose most of what the best of them keeps."""

    policy: str
    pictures: int
    agreement: float
    sqnr_db: float | None
    others: dict[str, float]
    at_fault: list[str]


class PassRecord(TypedDict):
    """A pass after the calibration: the logits' SQNR in dB and top-1 agreement in percent with float, [before, after].

    Both are empty for a pass that changed nothing. `kept`: it was not taken back. `keeps_function`: the float network
    computes the same as before the pass; `keeps_features`: so do the maps of its stages, at any picture size."""

    name: str
    options: dict[str, Any]
    note: str
    seconds: float
    kept: bool
    keeps_function: bool
    sqnr_db: list[float | None]
    agreement: list[float]
    keeps_features: NotRequired[bool]


class BitsRecord(TypedDict, total=False):
    """The bits for which ranges of activations were searched, the methods, and the passes behind them."""

    bits: int
    other_bits: dict[str, int]
    methods: dict[str, str]
    passes: list[PassRecord]


class SearchRecord(BitsRecord):
    """How ranges were found in the observed statistics."""

    method: str
    percentile: float | None
    dead_nodes: list[str]


class AdviceRecord(TypedDict):
    """A sentence of a calibration's advice, and the nodes that it is about. `kind`: its rule (`quant.advice`)."""

    kind: str
    text: str
    nodes: list[str]


class InputRecord(TypedDict):
    """An input of a wrapped module. `shape`: without the batch; `example`: its whole numbers, or one for all."""

    name: str
    shape: list[int]
    type: TypeName
    example: list[int]


class WrappedRecord(TypedDict):
    """How a user's module was captured: the arguments of `wrap`. `shape`: one input, without the batch; of several
    `inputs` by name, one row with all of them.

    `output`: None for several names, too. `outputs`: the names of the tensors that it gives. `classes`: how many its
    logits are of, 0 where it gives something else. `constants`: two sums over each tensor that the module computes with
    and that no checkpoint holds. `weights`: a hash of the float weights. Older cards lack these."""

    shape: list[int]
    stem: bool
    output: str | None
    outputs: list[str]
    classes: NotRequired[int]
    inputs: NotRequired[list[InputRecord]]
    constants: NotRequired[dict[str, list[float]]]
    weights: NotRequired[Sha256]


class CoverageRecord(TypedDict):
    """How many products of a network are quantized, their share of its multiplications, and the kinds that are not."""

    quantized: int
    products: int
    share: float
    left: dict[str, int]


class CalibrationRecord(SearchRecord):
    """How ranges were found, and from exactly which pictures; `files` are names relative to the data set.

    `method` is that of the enabled activation nodes, joined by "+" where they have several. `dead_nodes` saw only
    zeros; the values of `beyond_half` overflow float16. Ranges of activations were searched for `bits` bits, of some
    nodes for `other_bits`, by the method that `methods` has for that number, in the file `statistics` beside the card.
    `passes` came after it, in this order; `advice` was given at the end. `coverage`: how much of a captured
    network the policy makes int8. `place`: the name of the data set."""

    exact: bool
    batches: int
    batch_size: int
    seed: int
    split: str
    augment: bool
    pictures: int
    pictures_sha256: str
    files: list[str]
    unreadable: list[str]
    beyond_half: list[str]
    check: NotRequired[CheckRecord | None]
    coverage: NotRequired[CoverageRecord]
    place: NotRequired[str]
    statistics: NotRequired[CheckpointRecord | None]
    advice: NotRequired[list[AdviceRecord]]


class RangesRecord(TypedDict):
    """How QAT found the ranges of the nodes that its policy enables: learned, or a method; None: as calibrated."""

    weights: str | None
    activations: str | None


Epoch = Annotated[
    dict[str, Any], Must(lambda result: type(result.get("epoch")) is int, "a mapping with its number, `epoch`")
]


class TrainingRecord(TypedDict):
    """How weights were trained: the whole recipe, and every epoch's result; `steps` are of the optimizer.

    QAT has `ranges`, for the bits of the card's policy."""

    recipe: dict[str, Any]
    seed: int
    world: int
    device: str
    step_pictures: int
    steps: int
    pictures: int
    pictures_sha256: str
    start: CheckpointRecord | None
    teacher: SourceRecord | None
    best_epoch: int | None
    epochs: list[Epoch]
    ranges: NotRequired[RangesRecord]


class KnownOptions(TypedDict, total=False):
    """The options of an artifact that are read again, whatever its backend; any other is the backend's own."""

    target: str | None
    float_type: str | None
    batch: int | None
    saturation_safe: list[str]
    plugin: list[str]


class TunedRecord(TypedDict):
    """The `files` that `export --tune` compared on a `cpu`: policy, plugins, ms by batch, SQNR in dB."""

    cpu: dict[str, Any]
    files: list[dict[str, Any]]


class ArtifactRecord(TypedDict):
    """An exported artifact: its main file beside the card, and the `others` that belong to it.

    `precision` is int8, float32, float16, W4A8, mixed, ...; `options` are what the export was asked for.
    """

    backend: str
    file: FileName
    sha256: Sha256
    precision: str
    options: dict[str, Any]
    others: list[CheckpointRecord]
    tuned: NotRequired[TunedRecord]


class VerificationRecord(TypedDict):
    """How far the logits of an artifact on one engine are from those of its checkpoint, on the same pictures.

    `mean` and `max` are of |Δlogit|; `step` is what int8 would resolve over the reference's logits, their amax / 127;
    `agreement` (top-1) is in percent, SQNR in dB (None if equal). `tolerance` is of the mean; None: not a criterion.
    An embedding or maps have `cosine` (the mean over pictures) in place of agreement, and differences in units of their
    mean magnitude. `int8_products`: how many of the `quantized_products` of an ONNX file the engine runs in int8, by
    its own graph.
    """

    engine: str
    precision: str
    policy: str | None
    reference: str
    pictures: int
    pictures_sha256: str
    mean: float
    max: float
    step: float
    agreement: float | None
    sqnr_db: float | None
    tolerance: float | None
    passed: bool | None
    cosine: NotRequired[float]
    int8_products: NotRequired[int]
    quantized_products: NotRequired[int]


class DatasetRecord(TypedDict):
    """The pictures that a result was measured on; `sha256` is of their list."""

    name: str
    split: str
    pictures: int
    sha256: str | None


@dataclass(frozen=True)
class Result:
    """One measurement of one engine. Accuracies and agreement in percent, loss in nats, SQNR in dB; None: not measured.

    `policy_sha256` is of the rules of the policy, which may share its name with another; None: not recorded.
    `agreement`, `sqnr_db`, `delta_acc1` and its paired standard error compare with float32 on the same pictures: with
    the original float checkpoint's. `weights` says whose weights were measured where they are not all the original's:
    original, ptq (those that QAT started from, calibrated) or qat. `calibrator` found its ranges where that is another
    than the card's calibration. `delta_ptq` and its paired standard error compare QAT with the PTQ that it began with.
    """

    engine: str
    precision: str
    policy: str | None
    dataset: DatasetRecord
    pictures: int
    acc1: float
    acc5: float
    loss: float | None
    batch_size: int
    device: str
    ms_per_picture: float | None = None
    agreement: float | None = None
    sqnr_db: float | None = None
    delta_acc1: float | None = None
    delta_acc1_se: float | None = None
    unreadable: int = 0
    note: str | None = None
    policy_sha256: str | None = None
    weights: str | None = None
    calibrator: str | None = None
    delta_ptq: float | None = None
    delta_ptq_se: float | None = None


def sha256_in(record: Mapping[str, Any] | None) -> str | None:
    """The hash in a record of a card, if there is one."""
    return record["sha256"] if record else None


class LossRecord(TypedDict):
    """Logits beside the float model's (`quant.distance.Loss`): SQNR in dB (None if equal), divergence (KL) in nats,
    top-1 agreement in percent, expected drop of top-1 in points, and its standard error.
    """

    sqnr_db: float | None
    kl: Annotated[float, within(least=0)]
    agreement: Annotated[float, within(least=0, most=100)]
    drop: Annotated[float, within(least=-100, most=100)]
    drop_error: NotRequired[Annotated[float, within(least=0)]]


class GroupRecord(TypedDict):
    """A node, or those of a layer, block, stage or role: the loss with only them quantized, and with all but them."""

    kind: str
    name: str
    nodes: int
    alone: LossRecord
    without: LossRecord


class SensitivityRecord(TypedDict):
    """The cost of each node under a policy. `profile`: block -> SQNR of its output in dB. `forwards`: passes."""

    policy: str
    policy_sha256: str
    pictures: int
    pictures_sha256: str | None
    overall: LossRecord
    groups: list[GroupRecord]
    profile: dict[str, float | None]
    forwards: float


class TriedRecord(TypedDict):
    """A policy that a search measured: its loss, and the milliseconds of a batch; None if the engine is emulated.

    `front`: no other policy with this loss or less is faster; on an emulated engine, none leaves fewer nodes float.
    """

    policy: str
    nodes: int
    loss: LossRecord
    ms: float | None
    found: bool
    front: bool


class FloatLayerRecord(TypedDict):
    """A layer that a search left float: SQNR in dB with only it quantized (None if equal), and the milliseconds of a
    batch that its quantization would save.
    """

    layer: str
    sqnr_db: float | None
    saved_ms: float


class TriedPolicies(TypedDict):
    """The policies that `search` measured on an engine. `pictures`: the number on which losses were measured.

    `left_float`: the layers that the policy it found leaves float; they cost `cost_ms` milliseconds a batch more than
    with all layers quantized. `policy_sha256`: of the policy that was found.
    """

    engine: str
    batch: int
    budget: str
    met: bool
    pictures: int
    tried: list[TriedRecord]
    left_float: NotRequired[list[FloatLayerRecord]]
    cost_ms: NotRequired[float]
    policy_sha256: NotRequired[str]
