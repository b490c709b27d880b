"""The run card: the JSON beside every checkpoint that says what was done to get it and what was measured with it.

It makes a run repeatable and an import checkable. The annotations below are the schema: reading and making a
card both check every key and type against them, since a card comes from another machine as easily as from here.
A card can grow: a key that came later is optional (a default, or a part of a record that is `total=False`), and keys
of a newer version are kept as they are, with a warning. What cannot be read so has another number in `SCHEMA`.
"""

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import torch

import swin_quant
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import check_json, fields_of, finite, read_json, sha256_of, sha256_of_data, write_json
from swin_quant.base.progress import log

FAMILY, FORMAT = "swin-quant/run-card/", 1
SCHEMA = f"{FAMILY}{FORMAT}"
ORIGINAL, PTQ, QAT = "original", "ptq", "qat"  # whose weights a result is of
UNQUANTIZED = "QAT weights, unquantized"  # what those are called with the nodes off, since they are no baseline
_MOST_UP, _LONGEST_PATH = 4, 255


class _Located(TypedDict, total=False):
    """`path`: where the file was, from the folder of the card; absolute while the card is in memory (`located`)."""

    path: str


class SourceRecord(_Located):
    """The float checkpoint that a run began with."""

    file: str
    sha256: str
    format: str


class CheckpointRecord(_Located):
    """A checkpoint: the one beside the card, or that of an artifact, or what training started from."""

    file: str
    sha256: str


class CheckRecord(TypedDict):
    """The calibrated model under `policy` beside itself in float, on some of the calibration pictures.

    `agreement` (top-1) in percent, SQNR of the logits in dB (None if equal); `others` is that SQNR by other methods,
    where they were tried; the ranges of the nodes `at_fault` lose most of what the best of them keeps.
    """

    policy: str
    pictures: int
    agreement: float
    sqnr_db: float | None
    others: dict[str, float]
    at_fault: list[str]


class _CalibrationRecord(TypedDict):
    method: str
    percentile: float | None
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
    dead_nodes: list[str]
    beyond_half: list[str]


class CalibrationRecord(_CalibrationRecord, total=False):
    """How ranges were found, and from exactly which pictures; `files` are names relative to the data set.

    `method` is that of the enabled activation nodes, joined by "+" where they have several. `dead_nodes` saw only
    zeros; the values of `beyond_half` overflow float16. Ranges of activations were searched for `bits` bits, of some
    nodes for `other_bits`, by the method that `methods` has for that number, in the file `statistics` beside the card.
    """

    check: CheckRecord | None
    bits: int
    other_bits: dict[str, int]
    methods: dict[str, str]
    statistics: CheckpointRecord | None


class RangesRecord(TypedDict):
    """How QAT found the ranges of the nodes that its policy enables: learned, or a method; None: as calibrated."""

    weights: str | None
    activations: str | None


class _TrainingRecord(TypedDict):
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
    epochs: list[dict[str, Any]]


class TrainingRecord(_TrainingRecord, total=False):
    """How weights were trained: the whole recipe, and every epoch's result; `steps` are of the optimizer.

    QAT has `ranges`, for the bits of the card's policy.
    """

    ranges: RangesRecord


class ArtifactRecord(TypedDict):
    """What a backend was given to run: its main file beside the card, and the `others` that belong to it.

    `precision` is int8, float32, float16, W4A8, mixed, ...; `options` are what the export was asked for.
    """

    backend: str
    file: str
    sha256: str
    precision: str
    options: dict[str, Any]
    others: list[CheckpointRecord]


class VerificationRecord(TypedDict):
    """How far the logits of an artifact on one engine are from those of its checkpoint, on the same pictures.

    `mean` and `max` are of |Δlogit|; `step` is what int8 would resolve over the reference's logits, their amax / 127;
    `agreement` (top-1) is in percent, SQNR in dB (None if equal). `tolerance` is of the mean; None: not a criterion.
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
    agreement: float
    sqnr_db: float | None
    tolerance: float | None
    passed: bool | None


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
    original, ptq (those that QAT started from, calibrated) or qat.
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

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Result":
        """A result of a card, without what a newer version may have added."""
        return cls(**{key: value for key, value in record.items() if key in fields_of(cls)[0]})


@dataclass(frozen=True)
class RunCard:
    """A run, as recorded. `results` holds what `Result`s are in JSON; `measured()` gives them back as such.

    `newer` holds the keys beside these that a newer version wrote.
    """

    name: str
    config: dict[str, Any]
    preprocess: dict[str, Any]
    source: SourceRecord | None = None
    checkpoint: CheckpointRecord | None = None
    policy: dict[str, Any] | None = None
    calibration: CalibrationRecord | None = None
    training: TrainingRecord | None = None
    artifact: ArtifactRecord | None = None
    versions: dict[str, str | None] = field(default_factory=lambda: versions())
    results: list[dict[str, Any]] = field(default_factory=list)
    verification: list[VerificationRecord] = field(default_factory=list)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    newer: dict[str, Any] = field(default_factory=dict, metadata={"json": False})

    def __post_init__(self) -> None:
        _check_card(self.to_dict(), "the new run card")

    def to_dict(self) -> dict[str, Any]:
        """The card as it is in JSON."""
        content = dataclasses.asdict(self)
        newer = content.pop("newer")
        return {"schema": SCHEMA, **content, **newer}

    @property
    def is_qat(self) -> bool:
        """Whether the weights were trained with nodes on, so that they are no longer those of the source."""
        training, quantized = self.training, self.policy is not None or self.calibration is not None
        return training is not None and (quantized or "ranges" in training)

    @property
    def original_sha256(self) -> str | None:
        """Which float model deltas are to: the source, or the checkpoint itself where that was trained in float."""
        record = self.checkpoint if self.training and not self.is_qat else self.source
        return record["sha256"] if record else None

    def measured(self) -> list[Result]:
        """The results, typed.

        One of before policies were told apart by their rules gets those of the card's policy. Cards of before `weights`
        was recorded compare QAT with its own weights unquantized: those are not its original, and such comparisons are
        left out.
        """
        results = [Result.of(record) for record in self.results]
        results = [_of_qat(result) if self.is_qat and result.weights is None else result for result in results]
        own = self.policy or {}
        sha256 = sha256_of_data(own["rules"]) if "rules" in own else None
        return [
            dataclasses.replace(result, policy_sha256=sha256)
            if result.policy and result.policy_sha256 is None and result.policy == own.get("name")
            else result
            for result in results
        ]

    def with_result(self, result: Result) -> "RunCard":
        """A card that also holds `result`, in the place of an older one of the same thing if there is one."""
        older = [_measure_the_same(old, result) for old in self.measured()]
        results = [record for record, is_older in zip(self.results, older, strict=True) if not is_older]
        place = older.index(True) if True in older else len(results)
        results.insert(place, finite(dataclasses.asdict(result)))
        return dataclasses.replace(self, results=results)

    def with_verification(self, record: VerificationRecord) -> "RunCard":
        """A card that also holds `record`, instead of what it said of the same engine, precision and reference."""
        identity = itemgetter("engine", "precision", "policy", "reference")
        kept = [old for old in self.verification if identity(old) != identity(record)]
        return dataclasses.replace(self, verification=[*kept, finite(record)])

    def write(self, path: str | os.PathLike) -> None:
        """Write the card to `path`, atomically."""
        folder = Path(path).resolve().parent
        write_json(path, _with_paths(self.to_dict(), lambda file: portable_path(file, folder)))

    @classmethod
    def read(cls, path: str | os.PathLike) -> "RunCard":
        """Read and check a card; errors name the file and the key. Keys of a newer version are kept and warned of."""
        content = read_json(path, "run card")
        try:
            unknown = _check_card(content, str(path))
            content = _with_paths(content, lambda file: _located(file, Path(path)))
            del content["schema"]
            newer = {key: content.pop(key) for key in content.keys() - fields_of(cls)[0]}
            card = cls(**content, newer=newer)
        except RecursionError as error:
            raise SwinQuantError(f"{path}: is not a run card: it is nested too deeply") from error
        if unknown:
            _warn_of_newer(str(path), tuple(unknown))
        return card


@functools.cache  # a command may read a card more than once
def _warn_of_newer(path: str, keys: tuple[str, ...]) -> None:
    log.warning("%s: kept as it is, but not understood, since a newer swin-quant wrote it: %s", path, listed(keys))


def _measure_the_same(one: Result, other: Result) -> bool:
    """Whether two results are of the same engine, precision, policy and pictures, the policy by its rules if known."""
    known = one.policy_sha256 and other.policy_sha256
    same_policy = one.policy_sha256 == other.policy_sha256 if known else one.policy == other.policy
    keys = ("engine", "precision", "weights", "dataset")
    return same_policy and all(getattr(one, key) == getattr(other, key) for key in keys)


def _of_qat(result: Result) -> Result:
    return dataclasses.replace(result, weights=QAT, agreement=None, sqnr_db=None, delta_acc1=None, delta_acc1_se=None)


def without_paths(card: RunCard) -> dict[str, Any]:
    """The card as JSON, less where files were: what does not depend on the machine and the folder."""
    return _with_paths(card.to_dict(), lambda file: None)


def portable_path(file: str | os.PathLike, folder: Path) -> str | None:
    """`file` from `folder`, both absolute, as a card may have it; None where that would tell where on the machine."""
    try:
        if os.path.commonpath([file, folder]) == Path(folder).anchor:
            return None
        path = Path(os.path.relpath(file, folder)).as_posix()
    except ValueError:  # on another drive
        return None
    return path if _is_portable(path) else None


def _is_portable(path: str) -> bool:
    """Whether a path is relative and plain: at most some steps up, then names."""
    parts = path.split("/")
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return len(path) <= _LONGEST_PATH and ups <= _MOST_UP and ups < len(parts) and all(map(_is_bare_name, parts[ups:]))


def _located(path: str, card: Path) -> str:
    if not _is_portable(path):
        raise SwinQuantError(f"{card}: a file's path must be relative and plain, not {path!r:.80}")
    return os.path.normpath(card.resolve().parent / path)


def _with_paths(content: dict[str, Any], change: Callable[[str], str | None]) -> dict[str, Any]:
    """`content`, a card in JSON, with the path of each file as `change` says, and none where that is None."""
    training = content.get("training") or {}
    places = [content.get("source"), content.get("checkpoint"), training.get("start"), training.get("teacher")]
    for record in places:
        if record and "path" in record:
            path = change(record.pop("path"))
            record |= {} if path is None else {"path": path}
    return content


def card_path(checkpoint: str | os.PathLike) -> Path:
    """Where the card of a checkpoint or artifact is: `out/x_calib.pth` -> `out/x_calib.json`."""
    path = Path(checkpoint)
    if path.suffix == ".json":
        raise SwinQuantError(f"{path}: a checkpoint cannot be called .json: that is the name of its run card")
    return path.with_suffix(".json")


def verify_checkpoint(card: RunCard, path: str | os.PathLike) -> None:
    """Raise unless `path` holds, byte for byte, the checkpoint that the card was written for."""
    if card.checkpoint is None:
        raise SwinQuantError(f"{path}: the run card {card.name} records no checkpoint to compare it with")
    actual, recorded = sha256_of(path), card.checkpoint["sha256"]
    if actual != recorded:
        raise SwinQuantError(
            f"{path}: is not the checkpoint of its run card: SHA-256 is {actual[:12]}..., the card has "
            f"{recorded[:12]}...: one of the two was replaced"
        )


def versions() -> dict[str, str | None]:
    """What the figures depend on besides the checkpoint; None where there is no such thing."""
    return {
        "swin_quant": swin_quant.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: _installed(package) for package in ("timm", "numpy")},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)  # reads a file: importing timm would take seconds
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def _check_card(content: Any, where: str) -> list[str]:
    """The keys that only a newer version knows."""
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        text = schema if isinstance(schema, str) else ""
        if (newer := re.fullmatch(re.escape(FAMILY) + "([0-9]{1,9})", text)) and int(newer[1]) > FORMAT:
            raise SwinQuantError(
                f"{where}: is a run card of format {newer[1]}, which a newer swin-quant wrote: update this one, which "
                f"reads format {FORMAT}"
            )
        shown = f"its schema is {schema!r:.60}" if text else "it names no schema"
        raise SwinQuantError(f"{where}: is not a run card of this version: {shown}, not {SCHEMA!r}")
    unknown: list[str] = []
    check_json({key: value for key, value in content.items() if key != "schema"}, RunCard, where, unknown=unknown)
    for index, result in enumerate(content.get("results", ())):
        check_json(result, Result, where, f"results[{index}]", unknown)
    others = content["artifact"]["others"] if content.get("artifact") else []
    records = {section: content.get(section) for section in ("source", "checkpoint", "artifact")}
    records["calibration.statistics"] = (content.get("calibration") or {}).get("statistics")
    for section, record in {**records, **{f"artifact.others[{i}]": other for i, other in enumerate(others)}}.items():
        if record and not re.fullmatch(r"[0-9a-f]{64}", record["sha256"]):
            raise SwinQuantError(f"{where}: {section}.sha256 is not 64 hexadecimal digits")
        if record and not _is_bare_name(record["file"]):
            raise SwinQuantError(f"{where}: {section}.file must be a bare file name, not {record['file']!r:.80}")
    if not _is_bare_name(content["name"]):
        raise SwinQuantError(f"{where}: name must be fit for a file name, not {content['name']!r:.80}")
    try:
        datetime.fromisoformat(content["created"])
    except ValueError as error:
        raise SwinQuantError(f"{where}: created is not an ISO date and time: {content['created']!r:.60}") from error
    return unknown


def _is_bare_name(name: str) -> bool:
    return 0 < len(name) <= 255 and name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")
