"""What `quantize` is asked for, settled before its first step: sources, policy, and all that can be refused by then."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from swin_quant.backends.backend import Backend
from swin_quant.backends.onnx.options import INT4_BITS
from swin_quant.backends.saturation import SAFE_BITS, needs_safe_weights
from swin_quant.base.distributed import this_world
from swin_quant.base.errors import UsageError
from swin_quant.base.files import compute_data_sha256, compute_sha256, finite
from swin_quant.base.progress import log
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.checkpoint.load import check_head
from swin_quant.config.load import portable_config
from swin_quant.config.outputs import LOGITS
from swin_quant.data.picture_set import PictureSet, Source
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import TRAIN, place_has
from swin_quant.exported import open_model
from swin_quant.loading import ModelFile, model_or_shapes
from swin_quant.model import choose_checkpoint_path
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import AUTO
from swin_quant.quant.policy import Policy
from swin_quant.score.engine import get_precision
from swin_quant.verbs.export_here import check_tunable
from swin_quant.verbs.export_target import ExportTarget, check_model, check_policy, engine_for, exporter_options
from swin_quant.verbs.timing import timed_backend

_PLACES = ("RESUME", "PRETRAINED")  # keys of a config that name files


def refuse_contradictions(choice: Policies, has_budget: bool, tune: bool, changes_policy: bool) -> None:
    """UsageError for options that contradict each other. `changes_policy`: one does that `tune` decides."""
    named = choice if isinstance(choice, PolicyChoice) else PolicyChoice()
    is_searched = named.policy == (AUTO,)
    if has_budget and not is_searched:
        raise UsageError(f"a budget needs ‹policy› {AUTO}, which searches for a policy that keeps it")
    if tune and (choice != PolicyChoice() or changes_policy):
        raise UsageError(
            "‹tune› chooses the policy, and times files in the engine's fastest types: leave ‹policy› and what changes "
            "one, ‹float_type› and ‹int4_weights› out"
        )
    if len(named.policy) > 1:
        raise UsageError(f"‹policy› {' '.join(named.policy)}: give one")
    if is_searched and named != PolicyChoice((AUTO,)):
        change = next(one.name for one in fields(named) if one.name != "policy" and getattr(named, one.name))
        told = "is for a policy with a name: calibrate, then `search --policy NAME` with it"
        raise UsageError(f"‹policy› {AUTO}: ‹{change}› {told}")


class FileInputs:
    """A checkpoint and a place with pictures, as the steps read them.

    `place` has the fields that were given, and the path; `settled` all, by the config.
    """

    def __init__(self, file: ModelFile, place: PictureSet) -> None:
        self.file, self.checkpoint, self.cfg = file, file.need_checkpoint(), file.config()
        self.card, self.kind = self.checkpoint.card, self.cfg.MODEL.OUTPUT_KIND
        if (file.opts or file.cfg) and not file.replace_head:  # which may give other classes than the file has
            check_head(self.checkpoint, self.cfg)
        self.checkpoint.forget()
        self.settled = place.settled(self.cfg)
        path = self.settled.path
        self.place = replace(place, path=path, zip_mode=self.settled.zip_mode or None)
        drawn = replace(self.settled, split=self.settled.split or TRAIN, cache_mode="no")
        self.drawn_sha256 = digest(drawn.open().names)  # says what is missing, before a policy compiles operators

    def calibrated_file(self, folder: Path, policy: Policy) -> Path:
        """Where the calibrated checkpoint will be. UsageError where it would replace the one that is calibrated."""
        usual = folder / f"{self.cfg.MODEL.NAME}_calib.pth"
        if usual.exists() and usual.samefile(self.checkpoint):
            raise UsageError(f"{usual}: the result would be written over it: give another ‹output›")
        named = self.cfg.MODEL.NAME, policy.to_dict()
        return choose_checkpoint_path(folder, *named, lambda _: False, tell=False)

    def hash_calibration(self, policy: Policy, passes: Any) -> dict[str, str]:
        """Hashes of all that a calibration depends on, beside the words of its command."""
        model = {key: value for key, value in finite(portable_config(self.cfg)["MODEL"]).items() if key not in _PLACES}
        data = [model, Preprocess.from_config(self.cfg).to_dict()]
        found = {"the checkpoint": self.checkpoint.sha256, "the pictures": self.drawn_sha256}
        found |= {"the policy": policy.sha256, "the configuration": compute_data_sha256(data)}
        return found | ({"the passes": compute_sha256(passes)} if passes and Path(passes).is_file() else {})

    def hash_scored(self) -> str:
        """The hash of the pictures that score. SwinQuantError where they are not there, or their labels do not fit."""
        names, classes = read_class_names(self.cfg, self.checkpoint), self.cfg.MODEL.NUM_CLASSES
        return digest(replace(self.settled, split="val", count=None, cache_mode="no").open(classes, names).names)

    def expected_file(self, policy: Policy, target: Backend, int4_weights: bool) -> str:
        """The name of the file that an export writes."""
        precision = "int4" if int4_weights else get_precision(model_or_shapes(self.cfg, policy=policy)).lower()
        kind = "" if self.kind == LOGITS else f"_{self.kind}"
        return target.exporting.file_name.format(name=self.cfg.MODEL.NAME, kind=kind, precision=precision)


@dataclass(frozen=True)
class Plan:
    """What the steps work on. `files`: None where something is in memory, whose steps are all done.

    `policy` calibrates; `used` is the same, loaded. `pictures` calibrate, `shown` verify and `scored` score, if any do.
    """

    subject: Any
    files: FileInputs | None
    name: str
    policy: Policies
    used: Policy
    pictures: Source
    shown: Source
    scored: Source | None

    @property
    def place(self) -> PictureSet | None:
        return self.pictures if isinstance(self.pictures, PictureSet) else None


def make_plan(
    model: Any,
    pictures: Source,
    target: Backend,
    choice: Policies,
    passes: Any,
    scored_on: Source | None,
    score_pictures: int | None,
    tune: bool,
) -> Plan:
    """Settle what is asked for.

    A warning says where a model that is calibrated gets another policy unasked, and where the default policy gets
    weights of 7 bits because the engine's products would saturate on this CPU.
    """
    place = pictures if isinstance(pictures, PictureSet) else None
    if isinstance(model, ModelFile) and place and place.upright is not None:
        model = replace(model, opts=(*model.opts, "DATA.UPRIGHT", str(place.upright)))
    is_plain = isinstance(passes, str | None) and isinstance(choice, PolicyChoice) and scored_on is None
    files = FileInputs(model, place) if isinstance(model, ModelFile) and place and is_plain else None
    subject: Any = files.file if files else open_model(model)
    if place and not files:
        place.settled().with_default_split(TRAIN).open()  # says what is missing, before the first step
    name, card = (files.cfg.MODEL.NAME, files.card) if files else (subject.name, subject.card)
    policy, exports = choice, target.exporting
    if isinstance(choice, PolicyChoice) and choice.policy in ((), (AUTO,)):  # the best, where a search begins, too
        safe, config = choice.saturation_safe, finite(files.cfg) if files else subject.card.config
        best = (exports.policies if safe else exports.policies_for(config))[:1]
        policy = replace(choice, policy=best)
        is_free = choice == PolicyChoice(off=choice.off) and not tune
        if is_free and needs_safe_weights(engine_for(target), config):
            policy = replace(policy, wprec=SAFE_BITS)
            told = "this CPU has no VNNI: weights get 7 bits, since products of 8 would saturate in %s; "
            log.warning(told + "‹policy› %s keeps 8, for a CPU that has it", target.name, best[0])
    used = one_policy(policy)
    if used is None:
        raise UsageError("‹policy›: is an empty list: name one, or leave it out")
    before = card.policy if card and choice == PolicyChoice() else None
    if card and before and before["rules"] != used.to_dict()["rules"]:
        told = "%s is calibrated under policy %s: it is calibrated anew under %s, the backend's best; ‹policy› chooses"
        log.warning(told, card.name, before["name"], used.name)
    place = files.place if files else place
    shown, scored = pictures if scored_on is None else scored_on, scored_on
    if score_pictures is not None and (not place or scored_on is not None):
        raise UsageError(f"‹score_pictures› {score_pictures}: needs a place on disk whose val is scored")
    if place and scored_on is None:
        has_val = place_has(place.path, "val", bool(place.zip_mode))
        shown = replace(place, split="val" if has_val else TRAIN, count=None, batch=None, seed=None)
        scored = replace(place, split=None, count=score_pictures, seed=None) if has_val else None
    return Plan(subject, files, name, policy, used, place or pictures, shown, scored)


def check_target(plan: Plan, target: Backend, is_searched: bool, int4_weights: bool, tune: bool) -> None:
    """UsageError for a model or policy that the target does not run, for INT4 where no file of the target, or no rule
    of the policy, has such weights, and for ‹tune› where the target or the model cannot have it."""
    policy, card = plan.used, plan.files.card if plan.files else plan.subject.card
    check_model(target, plan.files.cfg if plan.files else plan.subject.card.config)
    check_policy(target, policy)
    if is_searched:
        timed_backend(target.name, this_world().device.type)
    if int4_weights:
        exporter_options(target, "int8", {"int4_weights": True})
        if all(rule.bits is None or rule.bits > INT4_BITS for rule in policy.rules):
            name = policy.name
            raise UsageError(f"‹int4_weights›: policy {name} has no weights of {INT4_BITS} bits: give ‹policy› w4a16")
    if tune:
        before = replace(card, policy=policy.to_dict()) if card else None  # it is calibrated for that policy
        kind = plan.files.kind if plan.files else LOGITS
        check_tunable(ExportTarget.parse(target.name, "int8"), None, before, kind)
