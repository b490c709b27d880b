"""The run card: the JSON beside every checkpoint that records how it was made and what was measured with it.

It makes a run repeatable and an import checkable. The annotations here and in `records` are the schema: reading and
making a card both check every key and type against them, since a card comes from another machine as easily as from
here. A card can grow: a later key is optional (a default, or a part of a record with `total=False`), so that older
cards are read. A key that is not known is refused. An incompatible format has another number in `SCHEMA`.
"""

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timezone
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any

from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_sha256, finite, one_at_a_time, read_json, write_json
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.base.schema import check_record, checked, get_fields
from swin_quant.cards import records
from swin_quant.cards.paths import located, portable_path, with_paths

FAMILY = "swin-quant/run-card/"
SCHEMA = f"{FAMILY}1"


def versions() -> dict[str, str | None]:
    """Versions of software, and the hardware; None for anything absent."""
    import torch  # cards are read without it

    return {
        "swin_quant": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: importlib.metadata.version(package) for package in ("timm", "numpy")},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def made_now() -> dict[str, Any]:
    """What a card says of the moment and the place at which its file was made."""
    return {"versions": versions(), "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


@dataclass(frozen=True)
class RunCard:
    """A run, as recorded. `results` holds `Result`s as JSON; `measured()` gives them as objects.

    `class_names`: the model's class names in order, where known. `wrapped`: how a user's module was captured.
    `checked`: the card comes from a file that was checked already.
    """

    name: records.FileName
    config: dict[str, Any]
    preprocess: dict[str, Any]
    source: records.SourceRecord | None = None
    checkpoint: records.CheckpointRecord | None = None
    policy: dict[str, Any] | None = None
    calibration: records.CalibrationRecord | None = None
    training: records.TrainingRecord | None = None
    artifact: records.ArtifactRecord | None = None
    sensitivity: records.SensitivityRecord | None = None
    searches: list[records.TriedPolicies] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=versions)
    results: list[dict[str, Any]] = field(default_factory=list)
    verification: list[records.VerificationRecord] = field(default_factory=list)
    class_names: records.ClassNames = field(default_factory=list)
    wrapped: records.WrappedRecord | None = None
    created: records.Moment = field(default_factory=lambda: made_now()["created"])
    checked: InitVar[bool] = False

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            _check_card(self.to_dict(), "the new run card")

    def to_dict(self) -> dict[str, Any]:
        """The card as it is in JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @property
    def is_qat(self) -> bool:
        """Whether the weights were trained with nodes on, so that they are no longer those of the source."""
        training, quantized = self.training, self.policy is not None or self.calibration is not None
        return training is not None and (quantized or "ranges" in training)

    @property
    def kept_passes(self) -> list[records.PassRecord]:
        """The passes that were not taken back, in this calibration and in earlier ones of the same weights."""
        passes = self.calibration.get("passes", []) if self.calibration else []
        return [one for one in passes if one["kept"]]

    @property
    def has_own_weights(self) -> bool:
        """Whether the weights, in float, compute something else than the source: after QAT or correcting passes."""
        return self.is_qat or any(not one["keeps_function"] for one in self.kept_passes)

    @property
    def changes_features(self) -> bool:
        """Whether maps of stages differ from the source's at some picture size, though the logits do not."""
        return any(not one.get("keeps_features", True) for one in self.kept_passes)

    @property
    def start(self) -> records.CheckpointRecord | None:
        """The checkpoint that training began with; None if nothing was trained, or from random weights."""
        return self.training["start"] if self.training else None

    @property
    def original_sha256(self) -> str | None:
        """The float model that deltas compare with: the source, or the checkpoint itself if it was trained in float."""
        record = self.checkpoint if self.training and not self.is_qat else self.source
        return records.sha256_in(record)

    @property
    def weights_sha256(self) -> str | None:
        """The file with the weights: the calibrated checkpoint, or the float one."""
        return records.sha256_in(self.checkpoint or self.source)

    def measured(self) -> list[records.Result]:
        """The results, typed."""
        return [records.Result(**record) for record in self.results]

    def with_result(self, result: records.Result) -> "RunCard":
        """A card that also holds `result`, in place of an older one for the same engine, policy and pictures."""

        def identity(one: records.Result) -> tuple[object, ...]:
            return one.engine, one.precision, one.weights, one.dataset, one.policy_sha256 or one.policy

        older = [identity(old) == identity(result) for old in self.measured()]
        results = [record for record, is_older in zip(self.results, older, strict=True) if not is_older]
        place = older.index(True) if True in older else len(results)
        results.insert(place, finite(dataclasses.asdict(result)))
        return dataclasses.replace(self, results=results)

    def with_new_weights(self, **parts: Any) -> "RunCard":
        """A card with these parts, and without what was measured with other weights."""
        none: dict[str, Any] = {"results": [], "verification": [], "sensitivity": None, "searches": []}
        return dataclasses.replace(self, **none, **parts, **made_now())

    def with_verification(self, record: records.VerificationRecord) -> "RunCard":
        """A card that also holds `record`, instead of an older one for the same engine, precision and reference."""
        newest = _newest(self.verification, record, "engine", "precision", "policy", "reference")
        return dataclasses.replace(self, verification=newest)

    def with_search(self, record: records.TriedPolicies) -> "RunCard":
        """A card that also holds `record`, instead of an older search for the same engine and batch."""
        return dataclasses.replace(self, searches=_newest(self.searches, record, "engine", "batch"))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the card to `path`, atomically."""
        folder = Path(path).resolve().parent
        write_json(path, with_paths(self.to_dict(), lambda file: portable_path(file, folder)))

    @classmethod
    @reads("run card", lambda cls, path: path)
    def read(cls, path: str | os.PathLike[str]) -> "RunCard":
        """Read and check a card; errors name the file and the key."""
        content = read_json(path, "run card")
        try:
            _check_card(content, str(path))
            content = with_paths(content, lambda file: located(file, Path(path)))
            del content["schema"]
            return cls(**content, checked=True)
        except RecursionError as error:
            raise SwinQuantError(f"{path}: is not a run card: it is nested too deeply") from error


def _newest(older: Iterable[Any], record: Any, *keys: str) -> list[Any]:
    """The `older` records, with `record` in place of one with the same values of `keys`."""
    identity = itemgetter(*keys)
    return [*(old for old in older if identity(old) != identity(record)), finite(record)]


def without_paths(card: RunCard) -> dict[str, Any]:
    """The card as JSON without the places of files, which depend on the machine and the folder."""
    return with_paths(card.to_dict(), lambda file: None)


def verify_checkpoint(card: RunCard, path: str | os.PathLike[str], sha256: Callable[[], str] | None = None) -> None:
    """Raise unless `path` holds, byte for byte, the checkpoint that the card was written for."""
    if card.checkpoint is None:
        raise SwinQuantError(f"{path}: the run card {card.name} records no checkpoint to compare it with")
    actual, recorded = sha256() if sha256 else compute_sha256(path), card.checkpoint["sha256"]
    if card.artifact and actual == card.artifact.get("sha256"):
        raise SwinQuantError(f"{path}: is an exported file: give its checkpoint, {card.checkpoint['file']}")
    if actual != recorded:
        raise SwinQuantError(
            f"{path}: is not the checkpoint of its run card: SHA-256 is {actual[:12]}..., the card has "
            f"{recorded[:12]}...: one of the two was replaced: calibrate again, or move the card away"
        )


def _check_card(content: Any, where: str) -> None:
    if not isinstance(content, dict) or "schema" not in content:
        raise SwinQuantError(f"{where}: is not a run card: a card is a mapping with a key schema")
    if (schema := content["schema"]) != SCHEMA:
        raise SwinQuantError(
            f"{where}: is not a run card that this version reads: its schema is {schema!r:.60}, not {SCHEMA!r}: a card "
            "with a larger number needs a newer swin-quant"
        )
    check_record(RunCard, {key: value for key, value in content.items() if key != "schema"}, where)
    for index, result in enumerate(content.get("results", ())):
        check_record(records.Result, result, where, f"results[{index}]")
    if artifact := content.get("artifact"):
        known = artifact["options"].keys() & get_fields(records.KnownOptions)[0]
        check_record(records.KnownOptions, {key: artifact["options"][key] for key in known}, where, "artifact.options")
    if content.get("policy") is not None:
        checked(str, content["policy"].get("name"), where, "policy.name")


def update(path: Path, read: RunCard, change: Callable[[RunCard], RunCard]) -> RunCard:
    """Change the card at `path`, which may hold more by now than when it was `read`; returns the changed card.

    If it has become the card of another file, it is left alone with a warning, and the changed `read` is returned.
    """
    with one_at_a_time(path.parent):
        now = RunCard.read(path) if path.exists() else read
        if _whose(now) != _whose(read):
            log.warning("%s: became the run card of another file meanwhile: the new results are not in it", path)
            return change(read)
        changed = change(now)
        changed.write(path)
    return changed


def with_results(card: RunCard, results: Iterable[records.Result]) -> RunCard:
    """A card that also holds `results`; see `RunCard.with_result`."""
    return reduce(RunCard.with_result, results, card)


def _whose(card: RunCard) -> list[str | None]:
    return [records.sha256_in(record) for record in (card.artifact, card.checkpoint, card.source)]


def is_card(file: Path) -> bool:
    """Whether a file calls itself a run card, of whatever version."""
    return bool(schema_in(file))


def schema_in(file: Path) -> str | None:
    """The version of run cards that a file names; "" for JSON of another kind, None for what is no JSON."""
    try:
        content = read_json(file, "run card")
    except SwinQuantError:
        return None
    schema = content.get("schema") if isinstance(content, dict) else None
    return schema if isinstance(schema, str) and schema.startswith(FAMILY) else ""
