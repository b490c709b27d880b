"""The steps of `quantize`: the options of each verb on a checkpoint's way, and whether its result is there already.

Each step leaves files that say what they were made of, so that a run which was cut off goes on where it stopped.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engine_named, takers, targets
from swin_quant.backends.saturation import without_saturation
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.records import DatasetRecord
from swin_quant.checkpoint.class_names import names_of
from swin_quant.checkpoint.opened import OpenedCheckpoint, open_checkpoint
from swin_quant.cli import shared
from swin_quant.cli.flags import words_from
from swin_quant.data.calibration import seeded_order
from swin_quant.data.sources import has_split, open_unlabelled
from swin_quant.quant.names import AUTO
from swin_quant.quant.policy import Policy
from swin_quant.score.scoring import dataset_record, open_labelled
from swin_quant.verbs import calibrate, evaluate, export, search, verify
from swin_quant.verbs.calibrate import CalibrateOptions, CalibrationPlan, plan_of
from swin_quant.verbs.evaluate import EvaluateOptions
from swin_quant.verbs.evaluate_artifacts import write_cards
from swin_quant.verbs.export import ExportOptions
from swin_quant.verbs.export_target import float_type_options
from swin_quant.verbs.policy_search import found_before
from swin_quant.verbs.quantize import MAX_DROP, QuantizeOptions
from swin_quant.verbs.quantize_done import (
    artifact_of,
    calibrated_place,
    changed,
    is_calibrated,
    is_found,
    is_scored,
    is_verified,
)
from swin_quant.verbs.search import BudgetOptions, MeasuredOptions, SearchOptions
from swin_quant.verbs.search_settings import SearchSettings
from swin_quant.verbs.verify import VerifyOptions

ARTIFACT = "ARTIFACT"  # its name in commands, as long as it is not there: its exporter names it
VAL = "val"


class Step(NamedTuple):
    """A verb with its options, as they are by then; whether its result is there; and in what that is of something
    else, if one is there."""

    verb: str
    options: Callable[[], Any]
    is_done: Callable[[], bool]
    run: Callable[[Any], object]
    changed: Callable[[], list[str] | None] = list

    @property
    def command(self) -> str:
        return f"swin-quant {self.verb} {shlex.join(words_from(self.options()))}"

    def do(self) -> None:
        self.run(self.options())


@dataclass(frozen=True)
class Quantization:
    """One checkpoint on its way to an artifact in `folder`."""

    options: QuantizeOptions
    checkpoint: OpenedCheckpoint
    cfg: CfgNode
    folder: Path
    world: World

    @classmethod
    def of(cls, options: QuantizeOptions, checkpoint: str, world: World, several: bool = False) -> "Quantization":
        """`several`: the checkpoint has a folder of its name below ‹output›. UsageError for what nothing can do."""
        opened = open_checkpoint(checkpoint)
        cfg = shared.config_of(opened, options.model, options.data, options.run, OUTPUT=options.output)
        opened.forget()
        below = Path(options.output or "output") / cfg.MODEL.NAME if several else shared.output_dir(options.output, cfg)
        asked = cls(options, opened, cfg, below, world)
        asked.float_type  # noqa: B018  (a type that nothing has is said before any work)
        return asked

    @property
    def target(self) -> Backend:
        return targets()[self.options.backend]

    @property
    def takers(self) -> list[Backend]:
        """The engines that run what is exported."""
        return takers(self.target.exporting.artifact)

    @property
    def engine(self) -> str | None:
        """The engine that the artifact is verified and scored on; None where it is not here, or has to be built."""
        if self.target.load:
            return self.target.name if self.target.runs_its_export and self.target.is_installed else None
        return next((backend.name for backend in self.takers if backend.is_installed), None)

    @cached_property
    def float_type(self) -> str | None:
        """The type that the exporter is told, for the engine to run what is not int8 as the options say."""
        engine = engine_named(self.engine) if self.engine else None
        return float_type_options(self.target, engine, self.options.timing.float_type).get("float_type")

    @cached_property
    def named(self) -> shared.PolicyOptions:
        """The policy of the calibration: the one that was named, else the backend's best."""
        given = self.options.policy
        return given if given.policy not in ((), (AUTO,)) else replace(given, policy=self.target.exporting.policies[:1])

    @cached_property
    def policy(self) -> Policy:
        """`named`, loaded: what passes round is for its bits."""
        policy = self.named.one()
        assert policy is not None
        return without_saturation(policy) if self.named.saturation_safe else policy

    @cached_property
    def plan(self) -> CalibrationPlan:
        return plan_of(self.calibrating, self.cfg)

    @cached_property
    def calibrated_on(self) -> list[str]:
        """The pictures of which the first that are readable calibrate. SwinQuantError where they are not to be had."""
        return seeded_order(open_unlabelled(self.cfg, self.plan.split), self.plan.seed)

    @cached_property
    def scored_on(self) -> DatasetRecord:
        """The pictures that the artifact is scored on. SwinQuantError where they are not to be had."""
        names = names_of(self.cfg, self.checkpoint)
        return dataset_record(self.cfg.DATA.DATA_PATH, VAL, open_labelled(self.cfg, VAL, World(), "no", names))

    @property
    def calibrated(self) -> Path:
        """The calibrated checkpoint, whatever its name; where it will be written, as long as there is none."""
        return calibrated_place(self)

    @property
    def exported_policy(self) -> Policy | None:
        """The policy of the artifact; None while it is not found yet."""
        return found_before(self.search) if self.search else self.policy

    @property
    def made(self) -> Artifact:
        """SwinQuantError while there is none."""
        if (made := artifact_of(self)) is None:
            backend, checkpoint = self.options.backend, self.calibrated.name
            raise SwinQuantError(f"{self.folder}: holds no artifact of {checkpoint} for {backend}")
        return made

    @cached_property
    def calibrating(self) -> CalibrateOptions:
        asked = self.options
        return CalibrateOptions(
            str(self.checkpoint),
            asked.model,
            data=replace(self._data, half="auto"),
            sample=asked.sample,
            ranges=asked.ranges,
            passes=asked.passes,
            policy=self.named,
            run=asked.run,
            output=str(self.folder),
            no_eval=True,
        )

    @property
    def searching(self) -> SearchOptions:
        """For --policy auto: which layers of the calibrated policy stay float."""
        asked, data = self.options, self._data
        budget = asked.budget if asked.budget != BudgetOptions() else BudgetOptions(max_drop=MAX_DROP)
        given = {one.name: getattr(data, one.name) for one in fields(shared.LoadingOptions)}
        return SearchOptions(
            checkpoint=str(self.calibrated),
            engine=self.target.name,
            budget=budget,
            data=MeasuredOptions(**given, split=self.plan.split),
            timing=asked.timing,
            run=asked.run,
            output=str(self.folder),
        )

    @cached_property
    def search(self) -> SearchSettings | None:
        """The search for the policy; None where one was named."""
        if self.options.policy.policy != (AUTO,):
            return None
        return search.settings_of(self.searching, str(self.calibrated), self.cfg, self.world)

    @property
    def exporting(self) -> ExportOptions:
        place = self.search.file if self.search else None
        return ExportOptions(
            backend=self.options.backend,
            checkpoint=str(self.calibrated),
            policy=shared.PolicyOptions((str(place),)) if place else self.named,
            float_type=self.float_type,  # type: ignore[arg-type]  # one of its choices
            output=str(self.folder),
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
                split=VAL if self.has_val else self.plan.split,
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
        return has_split(self.cfg, VAL)

    @property
    def _data(self) -> shared.ScoringOptions:
        return replace(self.options.data, data_path=self.cfg.DATA.DATA_PATH, zip=self.cfg.DATA.ZIP_MODE)

    @property
    def _engines(self) -> shared.EngineFlags:
        engine, timing = (self.engine,) if self.engine else (), self.options.timing
        return shared.EngineFlags(engine, timing.threads, float_type=timing.float_type)

    @property
    def _artifact(self) -> str:
        made = artifact_of(self)
        return str(made.file) if made else ARTIFACT

    @property
    def steps(self) -> list[Step]:
        """What is to be done, in order."""
        found = [
            Step("calibrate", lambda: self.calibrating, partial(is_calibrated, self), self._calibrate,
                 partial(changed, self)),
        ]  # fmt: skip
        if self.search:
            found.append(Step("search", lambda: self.searching, partial(is_found, self), self._search))
        found.append(Step("export", lambda: self.exporting, lambda: artifact_of(self) is not None, self._export))
        if self.engine:
            found.append(Step("verify", lambda: self.verifying, partial(is_verified, self), self._verify))
        if self.engine and self.has_val:
            found.append(Step("evaluate", lambda: self.scoring, partial(is_scored, self), self._score))
        return found

    def _calibrate(self, options: CalibrateOptions) -> None:
        others = changed(self)
        usual = self.folder / f"{self.cfg.MODEL.NAME}_calib.pth"
        if others and usual.samefile(self.checkpoint):
            raise UsageError(
                f"{self.checkpoint}: what is asked for differs ({', '.join(others)}), and the result would be written "
                "over it: give another ‹output›"
            )
        calibrate.run(options, self.world)

    def _search(self, options: SearchOptions) -> None:
        asked = search.settings_of(options, str(self.calibrated), self.cfg, self.world)
        found = search.find_and_keep(search.costs_of(asked, asked.checkpoint))
        if not found.met:
            raise SwinQuantError(
                f"the budget cannot be met ({asked.limits}): the best that was found is {asked.file} "
                f"({found.found.figures})"
            )
        if found.is_float:
            raise SwinQuantError(
                f"within the budget ({asked.limits}) every layer stays float: loosen it, or deploy the float model: "
                f"`swin-quant export {shlex.quote(str(self.calibrated))} --for {self.target.name} --precision float`"
            )

    def _export(self, options: ExportOptions) -> None:
        export.exported_as(options.backend, options)

    def _verify(self, options: VerifyOptions) -> None:
        verify.refuse_failed(*verify.verified(options, self.world))

    def _score(self, options: EvaluateOptions) -> None:
        write_cards(evaluate.score_files(options, self.world))
