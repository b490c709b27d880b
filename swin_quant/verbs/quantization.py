"""One checkpoint on its way to an artifact in a folder, and which of its steps are done.

The run cards in the folder tell what their files were made from: a run that was cut off goes on by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.backends.saturation import without_saturation
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import compute_sha256, list_parts, plain
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord, DatasetRecord
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.checkpoint.opened import OpenedCheckpoint, made_before
from swin_quant.config.load import portable_config
from swin_quant.data.loader import seeded_order
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import TRAIN, place_has
from swin_quant.loading import ModelFile
from swin_quant.model import choose_checkpoint_path
from swin_quant.policies import PolicyChoice
from swin_quant.quant import AUTO, CALIBRATED_ON
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Policy
from swin_quant.score.engine import HALF_TYPES
from swin_quant.score.scoring import dataset_record
from swin_quant.verbs.budget import Budget
from swin_quant.verbs.calibrate import plan_passes
from swin_quant.verbs.calibration_passes import passes_in_weights
from swin_quant.verbs.calibration_result import place_named
from swin_quant.verbs.export_target import engine_for, float_type_options
from swin_quant.verbs.search import found_before
from swin_quant.verbs.search_costs import policy_file
from swin_quant.verbs.verification import failures


@dataclass(frozen=True)
class Quantization:
    """One checkpoint on its way to an artifact in `folder`; the rest as `quantize` was asked for it.

    `pictures` has all its fields, by the config; `asked` those that were given, and the path.
    """

    file: ModelFile
    cfg: CfgNode
    folder: Path
    target: Backend
    pictures: PictureSet
    asked: PictureSet
    choice: PolicyChoice
    method: Method
    passes: str | None
    budget: Budget
    int4_weights: bool
    tune: bool
    float_type_asked: str | None
    threads: int | None
    half: str

    @property
    def checkpoint(self) -> OpenedCheckpoint:
        return self.file.need_checkpoint()

    @property
    def engine(self) -> str | None:
        return engine_for(self.target)

    @property
    def is_automatic(self) -> bool:
        """Whether a search finds the policy."""
        return self.choice.policy == (AUTO,)

    @cached_property
    def float_type(self) -> str | None:
        """The type that the exporter is told, so that the engine runs float layers as they were asked for."""
        engine = engine_named(self.engine) if self.engine else None
        return float_type_options(self.target, engine, self.float_type_asked).get("float_type")

    @cached_property
    def calibrated_under(self) -> PolicyChoice:
        """The policy of the calibration: the one that was named, else the backend's best."""
        if self.choice.policy not in ((), (AUTO,)):
            return self.choice
        exports, config = self.target.exporting, plain(self.cfg)
        names = exports.policies if self.choice.saturation_safe else exports.policies_for(config)
        return replace(self.choice, policy=tuple(names[:1]))

    @cached_property
    def policy(self) -> Policy:
        """`calibrated_under`, loaded: passes round for its bits."""
        (policy,) = self.calibrated_under.load()
        return without_saturation(policy) if self.choice.saturation_safe else policy

    @property
    def has_val(self) -> bool:
        return place_has(self.pictures.path, "val", bool(self.pictures.zip_mode))

    @cached_property
    def scored_on(self) -> DatasetRecord:
        """The record of the pictures that score. SwinQuantError where they are not to be had."""
        names, classes = read_class_names(self.cfg, self.checkpoint), self.cfg.MODEL.NUM_CLASSES
        opened = replace(self.pictures, split="val", count=None, cache_mode="no").open(classes, names)
        return dataset_record(self.pictures.path, "val", opened)

    @property
    def calibrated(self) -> Path:
        """The calibrated checkpoint, whatever its name; where it will be written, as long as there is none."""
        named = self.folder, self.cfg.MODEL.NAME, self.policy.to_dict()
        return choose_checkpoint_path(*named, lambda file: _changed(self, file) == [], tell=False)

    @property
    def found_file(self) -> Path:
        """The policy that a search finds."""
        return policy_file(self.folder, self.cfg.MODEL.NAME, self.target.name)

    @property
    def exported_policy(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        if not self.is_automatic:
            return self.policy
        return found_before(_card(self.calibrated), self.target.name, 1, self.budget, self.found_file)

    @property
    def artifact(self) -> Artifact:
        """SwinQuantError while there is none."""
        if (found := find_artifact(self)) is None:
            raise SwinQuantError(f"{self.folder}: holds no artifact of {self.calibrated.name} for {self.target.name}")
        return found


def is_calibrated(job: Quantization) -> bool:
    """Whether the calibrated checkpoint is there, made from the same weights and pictures in the same way."""
    return _changed(job, job.calibrated) == []


def changed(job: Quantization) -> list[str] | None:
    """The options that differ from those of the calibrated checkpoint; None where there is no such file."""
    usual = job.folder / f"{job.cfg.MODEL.NAME}_calib.pth"
    return _changed(job, job.calibrated if job.calibrated.is_file() else usual)


def _changed(job: Quantization, file: Path) -> list[str] | None:
    card = _card(file)
    if card is None or card.calibration is None or card.source is None or card.checkpoint is None:
        return None
    record = card.calibration
    before = made_before(job.checkpoint)
    earlier = passes_in_weights(before)
    same = {
        "the checkpoint": _same_weights(card, before, job.checkpoint),
        "the calibrated file": card.checkpoint["sha256"] == _sha256(file),
        "the policy": (card.policy or {}).get("rules") == job.policy.to_dict()["rules"],
        "the model": _same_model(card, job.cfg),
        "the preprocessing": card.preprocess == Preprocess.from_config(job.cfg).to_dict(),
        "the calibrator": _same_method(record, job.method),
        "the percentile": record["percentile"] in (None, job.method.percentile),
        "the passes": passes_in_weights(card)[: len(earlier)] == earlier
        and plan_passes(job.passes).made(record.get("passes", [])[len(earlier) :], record.get("advice", [])),
    }
    different = [what for what, is_same in same.items() if not is_same]
    return different if _same_pictures(record, card, job) else [*different, "the pictures"]


def _same_method(record: CalibrationRecord, method: Method) -> bool:
    methods = {bits: method.for_bits(int(bits)) for bits in record.get("methods", {})}
    return record["exact"] == method.exact and record.get("methods") == methods


def _same_weights(card: RunCard, before: RunCard | None, checkpoint: OpenedCheckpoint) -> bool:
    """Whether a card's weights are those of `checkpoint`, or its calibrated ones, of which `before` is the card."""
    if card.source is None or before is None or before.source is None:
        return card.source is not None and card.source["sha256"] == checkpoint.sha256
    trained = replace(before, training=calibrated_again(before))
    return (
        card.source["sha256"] == before.source["sha256"]
        and without_paths(card)["training"] == without_paths(trained)["training"]
    )


def _same_model(card: RunCard, cfg: CfgNode) -> bool:
    """By the keys that both know: a newer version may have more."""
    before, now = card.config["MODEL"], plain(portable_config(cfg)["MODEL"])
    return all(before[key] == now[key] for key in before.keys() & now.keys() - {"RESUME", "PRETRAINED"})


def _same_pictures(record: CalibrationRecord, card: RunCard, job: Quantization) -> bool:
    """Whether the same pictures calibrated; the data are opened only if nothing else tells."""
    given = replace(job.pictures, split=job.pictures.split or TRAIN)  # as `calibrate` takes those of a checkpoint
    asked = (given.split, given.seed or 0, False)
    if (record["split"], record["seed"], record["augment"]) != asked or record.get("place") != place_named(given):
        return False
    try:
        opened = given.open()
        count = min(len(opened), CALIBRATED_ON) if given.count is None else given.count
        readable = (name for name in seeded_order(opened, given.seed or 0) if name not in record["unreadable"])
    except SwinQuantError:  # the calibration names the fault
        return False
    seen = list(islice(readable, count))  # fewer, where the data hold no more
    return record["pictures"] == len(seen) and record["pictures_sha256"] == digest(seen)


def is_found(job: Quantization) -> bool:
    """Whether the policy is there, found for the calibrated checkpoint."""
    return is_calibrated(job) and job.exported_policy is not None


def find_artifact(job: Quantization) -> Artifact | None:
    """The artifact of the calibrated checkpoint for the backend under the policy; None if missing or damaged."""
    if not is_calibrated(job) or (policy := job.exported_policy) is None:
        return None
    sha256 = _sha256(job.calibrated)
    targets = (job.target.name, job.target.exporting.fixed.get("target"))  # or an ONNX file for any engine
    for file in sorted(job.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            options = card.artifact["options"]
            is_ours = options.get("target", card.artifact["backend"]) in targets and _is_stored_so(options, job)
            if is_ours and _is_chosen_so(card, policy, job.tune):
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def _is_chosen_so(card: RunCard, policy: Policy, tune: bool) -> bool:
    """Whether an artifact has the policy that is wanted; the one that took the least time on such a CPU for ‹tune›."""
    tuned = card.artifact.get("tuned") if card.artifact else None
    if tune or tuned:
        return tune and tuned is not None and tuned["cpu"] == cpu_kind()
    return (card.policy or {}).get("rules") == policy.to_dict()["rules"]


def _is_stored_so(options: Mapping[str, Any], job: Quantization) -> bool:
    """Whether float layers were exported in the wanted type, and weights as INT4 if that is asked for."""
    exports = job.target.exporting
    wanted = job.float_type or exports.float_type
    has_floats = "float_type" not in exports.flags or options.get("float_type", wanted) == wanted
    return has_floats and bool(options.get("int4_weights")) == job.int4_weights


def is_verified(job: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes, with floats of the wanted type."""
    made = find_artifact(job)
    records = [one for one in made.card.verification if _ran_in_type(one["precision"], made, job)] if made else []
    return bool(records) and not failures(records)


def is_scored(job: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path, with floats of the wanted type."""
    made = find_artifact(job)
    if made is None:
        return False
    results = [one for one in made.card.measured() if one.policy and _ran_in_type(one.precision, made, job)]
    return any(result.dataset == job.scored_on for result in results)


def _ran_in_type(precision: str, made: Artifact, job: Quantization) -> bool:
    """Whether an engine of that precision ran float layers in the wanted type.

    An engine that chooses the type adds a half type to its precision; `find_artifact` checks all other engines.
    """
    if job.engine is None or not engine_named(job.engine).float_types:
        return True
    if job.float_type_asked in HALF_TYPES:
        return precision.endswith(f"+{job.float_type_asked}")
    return precision not in [f"{made.record['precision']}+{half}" for half in HALF_TYPES]


def _sha256(file: str | Path) -> str:
    """As `compute_sha256`; a file that every step of a run asks for is read once, and anew if it was written since."""
    path = Path(file)
    if not path.is_file() or list_parts(path):
        return compute_sha256(file)
    now = path.stat()
    return _hashed(path.resolve(), now.st_mtime_ns, now.st_size)


@lru_cache(maxsize=16)
def _hashed(path: Path, written: int, size: int) -> str:
    return compute_sha256(path)


def _card(file: Path) -> RunCard | None:
    try:
        return RunCard.read(card_path(file)) if file.is_file() and card_path(file).is_file() else None
    except SwinQuantError:
        return None
