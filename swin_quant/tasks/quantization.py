"""What is asked of `quantize`, and what of it is done: by what the files of the output folder say of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engine_named, takers, targets
from swin_quant.backends.saturation import without_saturation
from swin_quant.base.distributed import World, world_on
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import parts_of, sha256_of
from swin_quant.base.journal import plain
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CalibrationRecord, DatasetRecord
from swin_quant.checkpoint import made_before
from swin_quant.checkpoint.class_names import names_of
from swin_quant.config.load import portable_config
from swin_quant.data.calibration import seeded_order
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import open_unlabelled
from swin_quant.quant.calibration import Method
from swin_quant.quant.names import SEARCHED_ON
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy
from swin_quant.quant.search import Budget
from swin_quant.saving import place_of
from swin_quant.score.engine import HALF_TYPES
from swin_quant.score.options import EngineOptions
from swin_quant.score.scoring import dataset_record, open_labelled
from swin_quant.tasks.measuring import Measuring
from swin_quant.tasks.passes import of_weights
from swin_quant.tasks.search import PolicySearch, found_before
from swin_quant.tasks.sensitivity import Sampling
from swin_quant.verbs.calibrate import CalibrationPlan
from swin_quant.verbs.export_target import float_type_options
from swin_quant.verbs.verify import failures

VAL = "val"
_FILES = {"RESUME", "PRETRAINED"}  # keys of MODEL that say nothing of it


@dataclass(frozen=True)
class Quantization:
    """What is asked for: `checkpoint`, float or calibrated, on the pictures of `cfg`, for a backend, in `folder`.

    `policy` None is the best of the backend; with a `budget` or `max_ms`, layers of it stay float, as `search` finds;
    milliseconds are then of a `batch`, timed in so many `rounds` of `seconds`. `plan` says which pictures calibrate,
    `half` what is scored beside float32. `policy_word` is what names the policy to a command, and `words` what commands
    that do the same are further given, by their names.
    """

    checkpoint: str
    cfg: CfgNode
    backend: str
    folder: Path
    policy: Policy | None = None
    plan: CalibrationPlan = field(default_factory=CalibrationPlan)
    saturation_safe: bool = False
    options: EngineOptions = EngineOptions()
    budget: Budget = Budget()
    max_ms: float | None = None
    batch: int = 1
    half: str = "auto"
    policy_word: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    rounds: int = Measuring.rounds
    seconds: float = Measuring.seconds

    def __post_init__(self) -> None:
        if self.backend not in targets():
            raise UsageError(f"‹backend› {self.backend}: there are {', '.join(targets())}")
        if self.searching and self.saturation_safe:
            raise UsageError("‹saturation_safe›: what is searched for is measured as it is: leave it out")
        self.told_exporter  # noqa: B018  (a type that nothing has is said before any work)

    @cached_property
    def searching(self) -> PolicySearch | None:
        """The search for a policy, where a budget is given."""
        if self.budget == Budget() and self.max_ms is None:
            return None
        plan, calibrated = self.plan, str(self.calibrated)
        sampling = Sampling(SEARCHED_ON, plan.split, plan.seed + 1, max_unreadable=plan.max_unreadable)
        of = Measuring(self.cfg, calibrated, self.backend, self.folder, self.policy, self.batch, sampling, self.options,
                       self.rounds, self.seconds)  # fmt: skip
        return PolicySearch(of, self.budget, self.max_ms)

    @cached_property
    def told_exporter(self) -> dict[str, str]:
        """How the artifact is to be, for its engine to run it as the options say."""
        engine = engine_named(self.engine) if self.engine else None
        return float_type_options(self.target, engine, self.options.float_type)

    @cached_property
    def world(self) -> World:
        """Where torch computes: on the device of the engine. UsageError where that is not there."""
        return world_on(self.options.device)

    @property
    def exported(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        return found_before(self.searching) if self.searching else self.chosen

    @cached_property
    def scored_on(self) -> DatasetRecord:
        """The pictures that the artifact is scored on. SwinQuantError where they are not to be had."""
        names = names_of(self.cfg, self.checkpoint)
        return dataset_record(self.cfg.DATA.DATA_PATH, VAL, open_labelled(self.cfg, VAL, World(), "no", names))

    @cached_property
    def calibrated_on(self) -> list[str]:
        """The pictures of which the first that are readable calibrate. SwinQuantError where they are not to be had."""
        return seeded_order(open_unlabelled(self.cfg, self.plan.split), self.plan.seed)

    @property
    def target(self) -> Backend:
        return targets()[self.backend]

    @property
    def base(self) -> Policy:
        """The policy that was named, or is the backend's best."""
        return self.policy or load_policy(self.target.exporting.policies[0])

    @property
    def chosen(self) -> Policy:
        """The policy that calibration applies: what passes round is for its bits."""
        return without_saturation(self.base) if self.saturation_safe else self.base

    @property
    def usual(self) -> Path:
        """Where the calibrated checkpoint is written first: <NAME>_calib.pth."""
        return self.folder / f"{self.cfg.MODEL.NAME}_calib.pth"

    @property
    def calibrated(self) -> Path:
        """The calibrated checkpoint, whatever its name; where it will be written, as long as there is none."""
        holds = partial(_is_as_asked, self)
        return place_of(self.folder, self.cfg.MODEL.NAME, self.chosen.to_dict(), holds, tell=False)

    @property
    def engine(self) -> str | None:
        """The engine that the artifact is verified and scored on; None where it is not here, or has to be built."""
        if self.target.load:
            return self.backend if self.target.runs_its_export and self.target.is_installed else None
        return next((backend.name for backend in self.takers if backend.is_installed), None)

    @property
    def takers(self) -> list[Backend]:
        """The engines that run what is exported."""
        return takers(self.target.exporting.artifact)


def is_calibrated(asked: Quantization) -> bool:
    """Whether the calibrated checkpoint is there, made from the same weights and pictures in the same way."""
    return _is_as_asked(asked, asked.calibrated)


def _is_as_asked(asked: Quantization, file: Path) -> bool:
    return _changed(asked, file) == []


def changed(asked: Quantization) -> list[str] | None:
    """What is asked for otherwise than the calibrated checkpoint was made; None where there is none."""
    return _changed(asked, asked.calibrated if asked.calibrated.is_file() else asked.usual)


def _changed(asked: Quantization, file: Path) -> list[str] | None:
    card = _card(file)
    if card is None or card.calibration is None or card.source is None or card.checkpoint is None:
        return None
    record, plan = card.calibration, asked.plan
    before = made_before(asked.checkpoint)
    earlier = of_weights(before)
    same = {
        "the checkpoint": _same_weights(card, before, asked.checkpoint),
        "the calibrated file": card.checkpoint["sha256"] == _sha256(file),
        "the policy": (card.policy or {}).get("rules") == asked.chosen.to_dict()["rules"],
        "the model": _same_model(card, asked.cfg),
        "the preprocessing": card.preprocess == Preprocess.from_config(asked.cfg).to_dict(),
        "the calibrator": _same_method(record, plan.method),
        "the percentile": record.get("tried_percentile", record["percentile"]) in (None, plan.method.percentile),
        "the passes": of_weights(card)[: len(earlier)] == earlier
        and plan.passes.made(record.get("passes", [])[len(earlier) :], record.get("advice", [])),
    }
    different = [what for what, is_same in same.items() if not is_same]
    return different if _same_pictures(record, card, asked) else [*different, "the pictures"]


def _same_method(record: CalibrationRecord, method: Method) -> bool:
    chosen = "node_methods" in record  # for each node: calibrator auto
    methods = {bits: method.for_bits(int(bits)) for bits in record.get("methods", {})}
    same = (record["exact"], chosen) == (method.exact, method.is_auto)
    return same and (chosen or record.get("methods") == methods)


def _same_weights(card: RunCard, before: RunCard | None, checkpoint: str) -> bool:
    """Whether a card's weights are those of `checkpoint`, or its calibrated ones, of which `before` is the card."""
    if card.source is None or before is None or before.source is None:
        return card.source is not None and card.source["sha256"] == _sha256(checkpoint)
    trained = replace(before, training=calibrated_again(before))
    return (
        card.source["sha256"] == before.source["sha256"]
        and without_paths(card)["training"] == without_paths(trained)["training"]
    )


def _same_model(card: RunCard, cfg: CfgNode) -> bool:
    """By the keys that both know: a newer version may have more."""
    before, now = card.config["MODEL"], plain(portable_config(cfg)["MODEL"])
    return all(before[key] == now[key] for key in before.keys() & now.keys() - _FILES)


def _same_pictures(record: CalibrationRecord, card: RunCard, asked: Quantization) -> bool:
    """Whether the same calibrated; the data are only opened where nothing else tells."""
    plan, count = asked.plan, asked.plan.batches * asked.plan.batch_size
    if (
        card.config["DATA"]["DATA_PATH"] != Path(asked.cfg.DATA.DATA_PATH).name
        or record["pictures"] > count
        or (record["split"], record["seed"], record["augment"]) != (plan.split, plan.seed, plan.augment)
    ):
        return False
    try:
        readable = (name for name in asked.calibrated_on if name not in record["unreadable"])
    except SwinQuantError:  # whoever calibrates says what is wrong with them
        return False
    seen = list(islice(readable, count))  # fewer than were asked for, where the data hold no more
    return record["pictures"] == len(seen) and record["pictures_sha256"] == digest(seen)


def artifact_of(asked: Quantization) -> Artifact | None:
    """What was exported from the calibrated checkpoint for the backend, under the policy, if it is whole."""
    if not is_calibrated(asked):
        return None
    sha256, rules = _sha256(asked.calibrated), _rules_of_artifact(asked)
    if rules is None:
        return None
    for file in sorted(asked.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            made = card.artifact["options"].get("target", card.artifact["backend"])
            is_so = made in (asked.backend, _portable(asked)) and _has_floats(card.artifact["options"], asked)
            if (card.policy or {}).get("rules") == rules and is_so:
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def _rules_of_artifact(asked: Quantization) -> list[dict[str, Any]] | None:
    """Those of its policy; None while that is not found yet."""
    if (wanted := asked.exported) is None:
        return None
    rules: list[dict[str, Any]] = wanted.to_dict()["rules"]
    return rules


def _has_floats(options: Mapping[str, Any], asked: Quantization) -> bool:
    """Whether what is not int8 was exported in the type that is asked for."""
    exports = asked.target.exporting
    wanted = asked.told_exporter.get("float_type", exports.float_type)
    return "float_type" not in exports.flags or options.get("float_type", wanted) == wanted


def _portable(asked: Quantization) -> str | None:
    """What an ONNX file for any engine calls its target."""
    exports = asked.target.exports
    return exports.fixed.get("target") if exports else None


def is_verified(asked: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes, with the floats that are asked for."""
    made = artifact_of(asked)
    records = [one for one in made.card.verification if _is_so(one["precision"], made, asked)] if made else []
    return bool(records) and not failures(records)


def is_scored(asked: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path, with the floats that are asked for."""
    made = artifact_of(asked)
    if made is None:
        return False
    results = [one for one in made.card.measured() if one.policy and _is_so(one.precision, made, asked)]
    return any(result.dataset == asked.scored_on for result in results)


def _is_so(precision: str, made: Artifact, asked: Quantization) -> bool:
    """Whether an engine of that precision ran what is not int8 as asked for.

    One that chooses the type adds it where it is half; of others `artifact_of` knows it.
    """
    if asked.engine is None or not engine_named(asked.engine).float_types:
        return True
    if asked.options.float_type in HALF_TYPES:
        return precision.endswith(f"+{asked.options.float_type}")
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
