"""One checkpoint on its way to an artifact in a folder, and which of its steps are done.

The run cards in the folder tell what their files were made from: a run that was cut off goes on by them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engine_named
from swin_quant.backends.saturation import without_saturation
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import get_sha256, plain
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.lineage import calibrated_again
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import DatasetRecord
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.checkpoint.opened import OpenedCheckpoint, made_before
from swin_quant.config.load import portable_config
from swin_quant.config.outputs import LOGITS
from swin_quant.data.loader import seeded_order
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sources import TRAIN, place_has
from swin_quant.loading import ModelFile, model_or_shapes
from swin_quant.model import choose_checkpoint_path, passes_in_weights
from swin_quant.policies import PolicyChoice
from swin_quant.quant import AUTO
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Policy, load_policy
from swin_quant.score.engine import get_precision
from swin_quant.score.scoring import dataset_record
from swin_quant.verbs.calibrate import plan_passes
from swin_quant.verbs.calibration import were_drawn
from swin_quant.verbs.export_target import engine_for, float_type_options
from swin_quant.verbs.search_result import Budget, policy_file


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
    def drawn_from(self) -> PictureSet:
        """The pictures of which `calibrate` draws a sample."""
        return replace(self.pictures, split=self.pictures.split or TRAIN)

    @cached_property
    def drawn_names(self) -> list[str]:
        """All their names, in the order in which they are drawn. SwinQuantError where they are not to be had."""
        return seeded_order(replace(self.drawn_from, cache_mode="no").open(), self.pictures.seed or 0)

    @property
    def calibrated(self) -> Path:
        """The calibrated checkpoint, whatever its name; where it will be written, as long as there is none."""
        named = self.folder, self.cfg.MODEL.NAME, self.policy.to_dict()
        return choose_checkpoint_path(*named, lambda file: changed(self, file) == [], tell=False)

    @property
    def is_calibrated(self) -> bool:
        """Whether the calibrated checkpoint is there, made from the same weights and pictures in the same way."""
        return changed(self, self.calibrated) == []

    @property
    def found_file(self) -> Path:
        """The policy that a search finds."""
        return policy_file(self.folder, self.cfg.MODEL.NAME, self.target.name)

    @property
    def exported_file(self) -> Path:
        """The file that the export will write."""
        model, kind = model_or_shapes(self.cfg, policy=self.policy), self.cfg.MODEL.OUTPUT_KIND
        precision = "int4" if self.int4_weights else get_precision(model).lower()
        words = {"name": self.cfg.MODEL.NAME, "kind": "" if kind == LOGITS else f"_{kind}", "precision": precision}
        return self.folder / self.target.exporting.file_name.format(**words)

    @property
    def exported_policy(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        if not self.is_automatic:
            return self.policy
        card, key = _card(self.calibrated), (self.target.name, 1, str(self.budget.or_default))
        known = [one for one in card.searches if (one["engine"], one["batch"], one["budget"]) == key] if card else []
        is_there = known and known[-1]["met"] and self.found_file.is_file()
        policy = load_policy(str(self.found_file)) if is_there else None
        return policy if policy and policy.sha256 == known[-1].get("policy_sha256") else None


def changed(job: Quantization, file: Path | None = None) -> list[str] | None:
    """The options that differ from those of the calibrated checkpoint, or of `file`; None where there is none."""
    if file is None:
        file = job.calibrated if job.calibrated.is_file() else job.folder / f"{job.cfg.MODEL.NAME}_calib.pth"
    card = _card(file)
    if card is None or card.calibration is None or card.source is None or card.checkpoint is None:
        return None
    record, before = card.calibration, made_before(job.checkpoint)
    earlier, source = passes_in_weights(before), card.source["sha256"]
    if before is None or before.source is None:
        has_weights = source == job.checkpoint.sha256
    else:  # of a calibrated checkpoint, the weights that it was given
        trained = without_paths(replace(before, training=calibrated_again(before)))["training"]
        has_weights = source == before.source["sha256"] and without_paths(card)["training"] == trained
    model, now = card.config["MODEL"], plain(portable_config(job.cfg)["MODEL"])
    known = model.keys() & now.keys() - {"RESUME", "PRETRAINED"}  # a newer version may have more
    methods = {bits: job.method.for_bits(int(bits)) for bits in record.get("methods", {})}
    same = {
        "the checkpoint": has_weights,
        "the calibrated file": card.checkpoint["sha256"] == get_sha256(file),
        "the policy": (card.policy or {}).get("rules") == job.policy.to_dict()["rules"],
        "the model": all(model[key] == now[key] for key in known),
        "the preprocessing": card.preprocess == Preprocess.from_config(job.cfg).to_dict(),
        "the calibrator": record["exact"] == job.method.exact and record.get("methods") == methods,
        "the percentile": record["percentile"] in (None, job.method.percentile),
        "the passes": passes_in_weights(card)[: len(earlier)] == earlier
        and plan_passes(job.passes).made(record.get("passes", [])[len(earlier) :], record.get("advice", [])),
    }
    different = [what for what, is_same in same.items() if not is_same]
    is_same = were_drawn(record, job.drawn_from, lambda: job.drawn_names)
    return different if is_same else [*different, "the pictures"]


def _card(file: Path) -> RunCard | None:
    try:
        return RunCard.read(card_path(file)) if file.is_file() and card_path(file).is_file() else None
    except SwinQuantError:
        return None
