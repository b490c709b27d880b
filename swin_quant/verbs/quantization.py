"""One checkpoint on its way to an artifact: the options of each verb, and which of them are done.

The run cards in the output folder tell what their files were made from: a run that was cut off goes on by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named, targets
from swin_quant.backends.saturation import without_saturation
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import parts_of, plain, sha256_of
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord, DatasetRecord
from swin_quant.checkpoint.class_names import names_of
from swin_quant.checkpoint.opened import OpenedCheckpoint, made_before, open_checkpoint
from swin_quant.cli import shared
from swin_quant.config.load import portable_config
from swin_quant.data.loader import seeded_order
from swin_quant.data.picture_set import open_unlabelled
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import TRAIN, has_split
from swin_quant.model import place_of
from swin_quant.quant import AUTO
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Policy
from swin_quant.score.engine import HALF_TYPES
from swin_quant.score.scoring import dataset_record, open_labelled
from swin_quant.verbs.calibrate import CalibrateOptions, plan_of
from swin_quant.verbs.calibration_passes import of_weights
from swin_quant.verbs.calibration_result import CalibrationPlan
from swin_quant.verbs.evaluate import EvaluateOptions
from swin_quant.verbs.export import ExportOptions, OnnxFlags
from swin_quant.verbs.export_target import engine_for, float_type_options
from swin_quant.verbs.quantize_options import QuantizeOptions
from swin_quant.verbs.search_options import MeasuredOptions, SearchOptions, found_before, policy_file
from swin_quant.verbs.verify import VerifyOptions, failures

ARTIFACT = "ARTIFACT"  # its name in commands until its exporter names it


@dataclass(frozen=True)
class Quantization:
    """One checkpoint on its way to an artifact in `folder`."""

    options: QuantizeOptions
    checkpoint: OpenedCheckpoint
    cfg: CfgNode
    folder: Path
    world: World

    @classmethod
    def of(cls, options: QuantizeOptions, checkpoint: str, world: World, several: bool = False) -> Quantization:
        """`several`: the checkpoint has a folder of its name below ‹output›. UsageError for impossible options."""
        opened = open_checkpoint(checkpoint)
        cfg = shared.config_of(opened, options.model, options.data, options.run, OUTPUT=options.output)
        opened.forget()
        if not cfg.DATA.DATA_PATH or (not has_split(cfg, TRAIN) and not Path(cfg.DATA.DATA_PATH).exists()):
            open_unlabelled(cfg, TRAIN)  # says what is missing, before the choice of a policy compiles operators
        below = Path(options.output or "output") / cfg.MODEL.NAME if several else shared.output_dir(options.output, cfg)
        job = cls(options, opened, cfg, below, world)
        job.float_type  # noqa: B018  (a type that nothing has is refused before any work)
        return job

    @property
    def target(self) -> Backend:
        return targets()[self.options.backend]

    @property
    def engine(self) -> str | None:
        return engine_for(self.target)

    @cached_property
    def float_type(self) -> str | None:
        """The type that the exporter is told, so that the engine runs float layers as the options say."""
        engine = engine_named(self.engine) if self.engine else None
        return float_type_options(self.target, engine, self.options.timing.float_type).get("float_type")

    @cached_property
    def policy_options(self) -> shared.PolicyOptions:
        """The policy of the calibration: the one that was named, else the backend's best."""
        policy = self.options.policy
        if policy.policy not in ((), (AUTO,)):
            return policy
        exports, config = self.target.exporting, plain(self.cfg)
        names = exports.policies if policy.saturation_safe else exports.policies_for(config)
        return replace(policy, policy=names[:1])

    @cached_property
    def policy(self) -> Policy:
        """`policy_options`, loaded: passes round for its bits."""
        policy = self.policy_options.one()
        assert policy is not None
        return without_saturation(policy) if self.policy_options.saturation_safe else policy

    @cached_property
    def plan(self) -> CalibrationPlan:
        return plan_of(self.calibrating, self.cfg)

    @cached_property
    def calibrated_on(self) -> list[str]:
        """The pictures in seeded order: the first readable ones calibrate. SwinQuantError if there are none."""
        return seeded_order(open_unlabelled(self.cfg, self.plan.split), self.plan.seed)

    @cached_property
    def scored_on(self) -> DatasetRecord:
        """The pictures that the artifact is scored on. SwinQuantError where they are not to be had."""
        names = names_of(self.cfg, self.checkpoint)
        return dataset_record(self.cfg.DATA.DATA_PATH, "val", open_labelled(self.cfg, "val", World(), "no", names))

    @property
    def calibrated(self) -> Path:
        """The calibrated checkpoint, whatever its name; where it will be written, as long as there is none."""
        named = self.folder, self.cfg.MODEL.NAME, self.policy.to_dict()
        return place_of(*named, lambda file: _changed(self, file) == [], tell=False)

    @property
    def is_automatic(self) -> bool:
        """Whether the policy is searched for."""
        return self.options.policy.policy == (AUTO,)

    @property
    def found_file(self) -> Path:
        """The file of the policy that is searched for."""
        return policy_file(self.folder, self.cfg.MODEL.NAME, self.target.name)

    @property
    def exported_policy(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        if not self.is_automatic:
            return self.policy
        return found_before(_card(self.calibrated), self.searching, self.found_file)

    @property
    def artifact(self) -> Artifact:
        """SwinQuantError while there is none."""
        if (found := artifact_of(self)) is None:
            backend, checkpoint = self.options.backend, self.calibrated.name
            raise SwinQuantError(f"{self.folder}: holds no artifact of {checkpoint} for {backend}")
        return found

    @cached_property
    def calibrating(self) -> CalibrateOptions:
        options = self.options
        return CalibrateOptions(
            str(self.checkpoint),
            options.model,
            data=replace(self._data, half="auto"),
            sample=options.sample,
            ranges=options.ranges,
            passes=options.passes,
            policy=self.policy_options,
            run=options.run,
            output=str(self.folder),
            no_eval=True,
        )

    @property
    def searching(self) -> SearchOptions:
        """For --policy auto: which layers of the calibrated policy stay float."""
        options, data = self.options, self._data
        values = {one.name: getattr(data, one.name) for one in fields(shared.LoadingOptions)}
        return SearchOptions(
            checkpoint=str(self.calibrated),
            engine=self.target.name,
            budget=options.budget.or_default,
            data=MeasuredOptions(**values, split=self.plan.split),
            timing=options.timing,
            run=options.run,
            output=str(self.folder),
        )

    @property
    def exporting(self) -> ExportOptions:
        policy = shared.PolicyOptions((str(self.found_file),)) if self.is_automatic else self.policy_options
        policy = shared.PolicyOptions() if self.options.tune else policy
        return ExportOptions(
            backend=self.options.backend,
            checkpoint=str(self.calibrated),
            policy=policy,
            float_type=self.float_type,  # type: ignore[arg-type]  # one of its choices
            output=str(self.folder),
            onnx=OnnxFlags(int4_weights=self.options.int4_weights, tune=self.options.tune),
        )

    @property
    def verifying(self) -> VerifyOptions:
        data, cfg = self.options.data, self.cfg.DATA
        return VerifyOptions(
            self._artifact,
            engines=self._engines,
            place=shared.PictureOptions(
                cfg.DATA_PATH,
                zip=cfg.ZIP_MODE,
                split="val" if self.has_val else self.plan.split,
                max_unreadable=data.max_unreadable,
                workers=cfg.NUM_WORKERS,
            ),
            device=self.options.run.device,
        )

    @property
    def scoring(self) -> EvaluateOptions:
        run = shared.RunOptions(self.options.run.device)
        return EvaluateOptions((self._artifact,), data=self._data, engines=self._engines, run=run)

    @property
    def has_val(self) -> bool:
        return has_split(self.cfg, "val")

    @property
    def _data(self) -> shared.ScoringOptions:
        return replace(self.options.data, data_path=self.cfg.DATA.DATA_PATH, zip=self.cfg.DATA.ZIP_MODE)

    @property
    def _engines(self) -> shared.EngineFlags:
        engine, timing = (self.engine,) if self.engine else (), self.options.timing
        return shared.EngineFlags(engine, timing.threads, float_type=timing.float_type)

    @property
    def _artifact(self) -> str:
        return str(found.file) if (found := artifact_of(self)) else ARTIFACT


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
    record, plan = card.calibration, job.plan
    before = made_before(job.checkpoint)
    earlier = of_weights(before)
    same = {
        "the checkpoint": _same_weights(card, before, job.checkpoint),
        "the calibrated file": card.checkpoint["sha256"] == _sha256(file),
        "the policy": (card.policy or {}).get("rules") == job.policy.to_dict()["rules"],
        "the model": _same_model(card, job.cfg),
        "the preprocessing": card.preprocess == Preprocess.from_config(job.cfg).to_dict(),
        "the calibrator": _same_method(record, plan.method),
        "the percentile": record.get("tried_percentile", record["percentile"]) in (None, plan.method.percentile),
        "the passes": of_weights(card)[: len(earlier)] == earlier
        and plan.passes.made(record.get("passes", [])[len(earlier) :], record.get("advice", [])),
    }
    different = [what for what, is_same in same.items() if not is_same]
    return different if _same_pictures(record, card, job) else [*different, "the pictures"]


def _same_method(record: CalibrationRecord, method: Method) -> bool:
    chosen = "node_methods" in record  # for each node: calibrator auto
    methods = {bits: method.for_bits(int(bits)) for bits in record.get("methods", {})}
    same = (record["exact"], chosen) == (method.exact, method.is_auto)
    return same and (chosen or record.get("methods") == methods)


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
    plan, count = job.plan, job.plan.count
    if (
        card.config["DATA"]["DATA_PATH"] != Path(job.cfg.DATA.DATA_PATH).name
        or record["pictures"] > count
        or (record["split"], record["seed"], record["augment"]) != (plan.split, plan.seed, plan.augment)
    ):
        return False
    try:
        readable = (name for name in job.calibrated_on if name not in record["unreadable"])
    except SwinQuantError:  # the calibration names the fault
        return False
    seen = list(islice(readable, count))  # fewer, where the data hold no more
    return record["pictures"] == len(seen) and record["pictures_sha256"] == digest(seen)


def is_found(job: Quantization) -> bool:
    """Whether the policy is there, found for the calibrated checkpoint."""
    return is_calibrated(job) and job.exported_policy is not None


def artifact_of(job: Quantization) -> Artifact | None:
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
            if is_ours and _is_chosen_so(card, policy, job.options.tune):
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
    return has_floats and bool(options.get("int4_weights")) == job.options.int4_weights


def is_verified(job: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes, with floats of the wanted type."""
    made = artifact_of(job)
    records = [one for one in made.card.verification if _ran_in_type(one["precision"], made, job)] if made else []
    return bool(records) and not failures(records)


def is_scored(job: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path, with floats of the wanted type."""
    made = artifact_of(job)
    if made is None:
        return False
    results = [one for one in made.card.measured() if one.policy and _ran_in_type(one.precision, made, job)]
    return any(result.dataset == job.scored_on for result in results)


def _ran_in_type(precision: str, made: Artifact, job: Quantization) -> bool:
    """Whether an engine of that precision ran float layers in the wanted type.

    An engine that chooses the type adds a half type to its precision; `artifact_of` checks all other engines.
    """
    if job.engine is None or not engine_named(job.engine).float_types:
        return True
    if job.options.timing.float_type in HALF_TYPES:
        return precision.endswith(f"+{job.options.timing.float_type}")
    return precision not in [f"{made.record['precision']}+{half}" for half in HALF_TYPES]


def _sha256(file: str | Path) -> str:
    """As `sha256_of`; a file that every step of a run asks for is read once, and anew if it was written since."""
    path = Path(file)
    if not path.is_file() or parts_of(path):
        return sha256_of(file)
    now = path.stat()
    return _hashed(path.resolve(), now.st_mtime_ns, now.st_size)


@lru_cache(maxsize=16)
def _hashed(path: Path, written: int, size: int) -> str:
    return sha256_of(path)


def _card(file: Path) -> RunCard | None:
    try:
        return RunCard.read(card_path(file)) if file.is_file() and card_path(file).is_file() else None
    except SwinQuantError:
        return None
