"""The steps of `quantize`: each is a verb with its options, and is skipped where its result is there."""

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli.flags import words_from
from swin_quant.verbs import calibrate, evaluate, export, search, verify
from swin_quant.verbs.calibrate import CalibrateOptions
from swin_quant.verbs.evaluate import EvaluateOptions
from swin_quant.verbs.evaluate_artifacts import write_cards
from swin_quant.verbs.export import ExportOptions
from swin_quant.verbs.quantization import (
    Quantization,
    artifact_of,
    changed,
    is_calibrated,
    is_found,
    is_scored,
    is_verified,
)
from swin_quant.verbs.search import SearchOptions
from swin_quant.verbs.verify import VerifyOptions


class Step(NamedTuple):
    """A verb with its options at that moment, and whether its result is there; `changed`: the options by which a result
    that is there differs from what is asked for."""

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


def steps(asked: Quantization) -> list[Step]:
    """What is to be done, in order."""
    calibrating = partial(is_calibrated, asked), partial(_calibrate, asked), partial(changed, asked)
    found = [Step("calibrate", lambda: asked.calibrating, *calibrating)]
    if asked.search:
        found.append(Step("search", lambda: asked.searching, partial(is_found, asked), partial(_search, asked)))
    found.append(
        Step("export", lambda: asked.exporting, lambda: artifact_of(asked) is not None, partial(_export, asked))
    )
    if asked.engine:
        found.append(Step("verify", lambda: asked.verifying, partial(is_verified, asked), partial(_verify, asked)))
    if asked.engine and asked.has_val:
        found.append(Step("evaluate", lambda: asked.scoring, partial(is_scored, asked), partial(_score, asked)))
    return found


def _calibrate(asked: Quantization, options: CalibrateOptions) -> None:
    others = changed(asked)
    usual = asked.folder / f"{asked.cfg.MODEL.NAME}_calib.pth"
    if others and usual.samefile(asked.checkpoint):
        raise UsageError(
            f"{asked.checkpoint}: what is asked for differs ({', '.join(others)}), and the result would be written "
            "over it: give another ‹output›"
        )
    calibrate.run(options, asked.world)


def _search(asked: Quantization, options: SearchOptions) -> None:
    settings = search.settings_of(options, str(asked.calibrated), asked.cfg, asked.world)
    found = search.find_and_keep(search.costs_of(settings, settings.checkpoint))
    if not found.met:
        raise SwinQuantError(
            f"the budget cannot be met ({settings.limits}): the best that was found is {settings.file} "
            f"({found.found.figures})"
        )
    if found.is_float:
        raise SwinQuantError(
            f"within the budget ({settings.limits}) every layer stays float: loosen it, or deploy the float model: "
            f"`swin-quant export {shlex.quote(str(asked.calibrated))} --for {asked.target.name} --precision float`"
        )


def _export(asked: Quantization, options: ExportOptions) -> None:
    export.exported_as(options.backend, options)


def _verify(asked: Quantization, options: VerifyOptions) -> None:
    verify.refuse_failed(*verify.verified(options, asked.world))


def _score(asked: Quantization, options: EvaluateOptions) -> None:
    write_cards(evaluate.score_files(options, asked.world))
