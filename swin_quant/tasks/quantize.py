"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate.

Each step leaves files that say what they are of, so that a run which was cut off goes on where it stopped, and one that
is complete only shows its table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact, open_artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import targets
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.pictures import Pictures
from swin_quant.data.sources import has_split, open_pictures
from swin_quant.engines.options import EngineOptions
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy
from swin_quant.quant.search import Budget
from swin_quant.tasks.calibrate import CalibrationPlan, calibrate_checkpoint
from swin_quant.tasks.evaluate_artifacts import Scoring, score_artifacts, write_cards
from swin_quant.tasks.export import export_checkpoint
from swin_quant.tasks.policy_costs import Measuring
from swin_quant.tasks.search import PolicySearch, found_before, search
from swin_quant.tasks.sensitivity import Sampling
from swin_quant.tasks.verify import Verifying, failures, verify_artifact

TRAIN, VAL = "train", "val"


class Step(NamedTuple):
    """One step: the command that does the same, whether its result is there, and what does it."""

    command: str
    is_done: Callable[[], bool]
    do: Callable[[], object]


@dataclass(frozen=True)
class Quantization:
    """What is asked for: `checkpoint`, a float one, on the pictures of `cfg`, for a backend, in `folder`.

    `policy` None is the best of the backend; with a `budget` or `max_ms`, layers of it stay float, as `search` finds;
    milliseconds are then of a `batch`. `plan` says which pictures calibrate.
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

    def __post_init__(self) -> None:
        if self.backend not in targets():
            raise UsageError(f"‹backend› {self.backend}: there are {', '.join(targets())}")
        if self.searching and self.saturation_safe:
            raise UsageError("‹saturation_safe›: what is searched for is measured as it is: leave it out")

    @property
    def searching(self) -> PolicySearch | None:
        """The search for a policy, where a budget is given."""
        if self.budget == Budget() and self.max_ms is None:
            return None
        calibrated, sampling = str(self.calibrated), Sampling(256, self.plan.split, self.plan.seed + 1)
        of = Measuring(self.cfg, calibrated, self.backend, self.folder, self.policy, self.batch, sampling, self.options)
        return PolicySearch(of, self.budget, self.max_ms)

    @property
    def exported(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        return found_before(self.searching) if self.searching else self.chosen

    @property
    def target(self) -> Backend:
        return targets()[self.backend]

    @property
    def chosen(self) -> Policy:
        """The policy that calibration applies."""
        return self.policy or load_policy(self.target.exporting.policies[0])

    @property
    def calibrated(self) -> Path:
        return self.folder / f"{self.cfg.MODEL.NAME}_calib.pth"

    @property
    def engine(self) -> str | None:
        """The engine that the artifact is verified and scored on; None where it is not here, or has to be built."""
        if self.target.load:
            return self.backend if self.target.runs_its_export and self.target.is_installed else None
        return next((name for name, backend in _engines_for(self.target).items() if backend.is_installed), None)


def _engines_for(target: Backend) -> dict[str, Backend]:
    from swin_quant.backends.registry import takers

    return {backend.name: backend for backend in takers(target.exports.artifact)} if target.exports else {}


def steps(asked: Quantization) -> list[Step]:
    """What is to be done, in order."""
    data = f"--data-path {asked.cfg.DATA.DATA_PATH}" + (" --zip" if asked.cfg.DATA.ZIP_MODE else "")
    name, safe = asked.chosen.name, " --saturation-safe" if asked.saturation_safe else ""
    folder = f"--output {asked.folder}"
    count, passes = asked.plan.batches * asked.plan.batch_size, asked.plan.passes.words
    found = [
        Step(f"swin-quant calibrate {asked.checkpoint} {data} --policy {name} --pictures {count}{passes} "
             f"--no-eval {folder}",
             partial(is_calibrated, asked), partial(_calibrate, asked)),
    ]  # fmt: skip
    if searching := asked.searching:
        budget = " ".join(searching.flags)
        found.append(
            Step(f"swin-quant search {asked.calibrated} {data} --engine {asked.backend} {budget} {folder}",
                 lambda: is_calibrated(asked) and asked.exported is not None, partial(_search, asked))
        )  # fmt: skip
        name = str(searching.place)
    found += [
        Step(f"swin-quant export {asked.calibrated} --for {asked.backend} --policy {name}{safe} {folder}",
             lambda: artifact_of(asked) is not None, partial(_export, asked)),
    ]  # fmt: skip
    if asked.engine is None:
        return found
    shown = VAL if has_split(asked.cfg, VAL) else asked.plan.split
    found.append(
        Step(f"swin-quant verify ARTIFACT --engine {asked.engine} {data} --split {shown}",
             partial(is_verified, asked), partial(_verify, asked, shown))
    )  # fmt: skip
    if shown == VAL:
        found.append(
            Step(f"swin-quant evaluate ARTIFACT --engine {asked.engine} {data}",
                 partial(is_scored, asked), partial(_score, asked))
        )  # fmt: skip
    return found


def quantize(asked: Quantization) -> Artifact:
    """Do what is not done yet; the artifact with all that was measured in its card.

    SwinQuantError where the artifact does not compute what the model computes: it is then not scored.
    """
    todo = steps(asked)
    for number, step in enumerate(todo, 1):
        done = step.is_done()
        log.info("%d/%d %s%s", number, len(todo), step.command, ": done before" if done else "")
        if not done:
            step.do()
    if asked.engine is None:
        engines = [asked.target] if asked.target.load else list(_engines_for(asked.target).values())
        remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
        log.warning("neither verified nor scored: %s does not run its file here as it is (%s)", asked.backend, remedies)
        for command in asked.target.exporting.next_step:
            log.info("next: %s", command.format(file="ARTIFACT", checkpoint=asked.calibrated))
    elif not has_split(asked.cfg, VAL):
        log.warning("not scored: %s has no %s split", asked.cfg.DATA.DATA_PATH, VAL)
    made = artifact_of(asked)
    if made is None:
        raise SwinQuantError(f"{asked.folder}: the artifact is gone")
    return made


def quantize_all(asked: Mapping[str, Quantization]) -> tuple[dict[str, Artifact], list[SwinQuantError]]:
    """Each by its name, one after the other: what was made, and one error for all that failed; others go on."""
    made: dict[str, Artifact] = {}
    failed: dict[str, SwinQuantError] = {}
    for number, (name, one) in enumerate(asked.items(), 1):
        if len(asked) > 1:
            log.info("%d of %d: %s", number, len(asked), name)
        try:
            made[name] = quantize(one)
        except SwinQuantError as error:
            failed[name] = error
            if number < len(asked):
                log.warning("%s: %s: going on with the next", name, error)
    if len(asked) == 1 or not failed:
        return made, list(failed.values())
    reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
    return made, [SwinQuantError(f"{len(failed)} of {len(asked)} checkpoints failed: {reasons}")]


def is_calibrated(asked: Quantization) -> bool:
    """Whether the calibrated checkpoint is there, made from the same weights and pictures in the same way."""
    card = _card(asked.calibrated)
    if card is None or card.calibration is None or card.source is None or card.checkpoint is None:
        return False
    record, plan = card.calibration, asked.plan
    methods = {bits: plan.method.for_bits(int(bits)) for bits in record.get("methods", {})}
    chosen = "node_methods" in record  # for each node: calibrator auto
    return (
        card.source["sha256"] == sha256_of(asked.checkpoint)
        and card.checkpoint["sha256"] == sha256_of(asked.calibrated)
        and (card.policy or {}).get("rules") == asked.chosen.to_dict()["rules"]
        and record["pictures"] == plan.batches * plan.batch_size
        and (record["split"], record["seed"], record["augment"]) == (plan.split, plan.seed, plan.augment)
        and (record["exact"], chosen) == (plan.method.exact, plan.method.is_auto)
        and (chosen or record.get("methods") == methods)
        and plan.passes.made(record.get("passes", []))
    )


def artifact_of(asked: Quantization) -> Artifact | None:
    """What was exported from the calibrated checkpoint for the backend, if it is whole."""
    if not is_calibrated(asked):
        return None
    sha256 = sha256_of(asked.calibrated)
    for file in sorted(asked.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            made = card.artifact["options"].get("target", card.artifact["backend"])
            safe = (card.policy or {}).get("name", "").endswith("saturation-safe")
            wanted = asked.exported
            told = wanted is not None and (
                asked.searching is None or (card.policy or {}).get("rules") == wanted.to_dict()["rules"]
            )
            if told and made in (asked.backend, _portable(asked)) and safe == asked.saturation_safe:
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def _portable(asked: Quantization) -> str | None:
    """What an ONNX file for any engine calls its target."""
    exports = asked.target.exports
    return exports.fixed.get("target") if exports else None


def is_verified(asked: Quantization) -> bool:
    """Whether the artifact was found to compute what the model computes."""
    made = artifact_of(asked)
    return bool(made and made.card.verification) and not failures(made.card.verification if made else [])


def is_scored(asked: Quantization) -> bool:
    """Whether the artifact has a result on the pictures of the data path."""
    made = artifact_of(asked)
    place = (Path(asked.cfg.DATA.DATA_PATH).name, VAL)
    results = made.card.measured() if made else []
    return any(result.policy and (result.dataset["name"], result.dataset["split"]) == place for result in results)


def _calibrate(asked: Quantization) -> None:
    calibrate_checkpoint(asked.cfg, asked.checkpoint, asked.chosen, asked.plan, asked.folder)


def _search(asked: Quantization) -> None:
    searching = asked.searching
    if searching and not search(searching).met:
        raise SwinQuantError(
            f"the budget cannot be met ({searching.limits}): the best that was found is {searching.place}"
        )


def _export(asked: Quantization) -> None:
    export_checkpoint(asked.calibrated, asked.backend, asked.folder, policy=asked.exported,
                      saturation_safe=asked.saturation_safe)  # fmt: skip


def _verify(asked: Quantization, split: str) -> None:
    made = _made(asked)
    how = Verifying(_named(asked), asked.options, str(asked.calibrated), workers=asked.cfg.DATA.NUM_WORKERS)
    records = verify_artifact(made, partial(_unlabelled, asked.cfg, split), how)
    if failed := failures(records):
        raise SwinQuantError(f"{made.file}: verification failed: {'; '.join(failed)}")


def _score(asked: Quantization) -> None:
    data = {"DATA.DATA_PATH": asked.cfg.DATA.DATA_PATH, "DATA.ZIP_MODE": asked.cfg.DATA.ZIP_MODE}
    scoring = Scoring(_named(asked), asked.options, data, str(asked.calibrated))
    write_cards(score_artifacts([_made(asked)], scoring))


def _made(asked: Quantization) -> Artifact:
    made = artifact_of(asked)
    if made is None:
        raise SwinQuantError(f"{asked.folder}: holds no artifact of {asked.calibrated.name} for {asked.backend}")
    return made


def _named(asked: Quantization) -> Sequence[str] | None:
    return [asked.engine] if asked.engine else None


def _unlabelled(cfg: CfgNode, split: str) -> Pictures:
    return open_pictures(cfg.DATA.DATA_PATH, split, zip_mode=cfg.DATA.ZIP_MODE, cache_mode="no")


def _card(file: Path) -> RunCard | None:
    try:
        return RunCard.read(card_path(file)) if file.is_file() and card_path(file).is_file() else None
    except SwinQuantError:
        return None
