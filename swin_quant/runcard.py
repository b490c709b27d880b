"""The run card: the JSON beside every checkpoint that says what was done to get it and what was measured with it.

It makes a run repeatable and an import checkable. The annotations below are the schema: reading and making a
card both check every key and type against them, since a card comes from another machine as easily as from here.
"""

import dataclasses
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import torch

import swin_quant
from swin_quant.errors import SwinQuantError
from swin_quant.files import check_json, finite, read_json, sha256_of, write_json

SCHEMA = "swin-quant/run-card/1"


class SourceRecord(TypedDict):
    """The float checkpoint that a run began with."""

    file: str
    sha256: str
    format: str


class CheckpointRecord(TypedDict):
    """The checkpoint beside the card."""

    file: str
    sha256: str


class CalibrationRecord(TypedDict):
    """How ranges were found, and from exactly which pictures; `files` are names relative to the data set.

    `dead_nodes` saw only zeros; the values of `beyond_half` overflow float16.
    """

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


class TrainingRecord(TypedDict):
    """How weights were trained: the whole recipe, and every epoch's result; `steps` are of the optimizer."""

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

    `agreement`, `sqnr_db`, `delta_acc1` and its paired standard error compare with float32 on the same pictures.
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

    @property
    def identity(self) -> tuple[Any, ...]:
        """What was measured on what: a newer result of the same identity replaces an older one."""
        return self.engine, self.precision, self.policy, tuple(sorted(self.dataset.items(), key=str))


@dataclass(frozen=True)
class RunCard:
    """A run, as recorded. `results` holds what `Result`s are in JSON; `measured()` gives them back as such."""

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

    def __post_init__(self) -> None:
        _check_card(_as_json(self), "the new run card")

    def measured(self) -> list[Result]:
        """The results, typed."""
        return [Result(**result) for result in self.results]

    def with_result(self, result: Result) -> "RunCard":
        """A card that also holds `result`, in the place of an older one of the same identity if there is one."""
        record = finite(dataclasses.asdict(result))
        results = [record if old.identity == result.identity else dataclasses.asdict(old) for old in self.measured()]
        if record not in results:
            results.append(record)
        return dataclasses.replace(self, results=results)

    def with_verification(self, record: VerificationRecord) -> "RunCard":
        """A card that also holds `record`, instead of what it said of the same engine, precision and reference."""
        identity = itemgetter("engine", "precision", "policy", "reference")
        kept = [old for old in self.verification if identity(old) != identity(record)]
        return dataclasses.replace(self, verification=[*kept, finite(record)])

    def write(self, path: str | os.PathLike) -> None:
        """Write the card to `path`, atomically."""
        write_json(path, _as_json(self))

    @classmethod
    def read(cls, path: str | os.PathLike) -> "RunCard":
        """Read and check a card; errors name the file and the key."""
        content = read_json(path, "run card")
        if isinstance(content, dict):
            content.setdefault("verification", [])  # cards of before artifacts were verified have none
        try:
            _check_card(content, str(path))
            return cls(**{key: value for key, value in content.items() if key != "schema"})
        except RecursionError as error:
            raise SwinQuantError(f"{path}: is not a run card: it is nested too deeply") from error


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


def _as_json(card: RunCard) -> dict[str, Any]:
    return {"schema": SCHEMA, **dataclasses.asdict(card)}


def _check_card(content: Any, where: str) -> None:
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        shown = f"its schema is {schema!r:.60}" if isinstance(schema, str) else "it names no schema"
        raise SwinQuantError(f"{where}: is not a run card of this version: {shown}, not {SCHEMA!r}")
    check_json({key: value for key, value in content.items() if key != "schema"}, RunCard, where)
    for index, result in enumerate(content["results"]):
        check_json(result, Result, where, f"results[{index}]")
    others = content["artifact"]["others"] if content["artifact"] else []
    records = {section: content[section] for section in ("source", "checkpoint", "artifact")}
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


def _is_bare_name(name: str) -> bool:
    return 0 < len(name) <= 255 and name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")
