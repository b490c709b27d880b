"""The steps of `quantize`: each is a verb with its options, and is skipped where its result is there."""

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from swin_quant.backends.backend import Backend
from swin_quant.backends.onnx.options import INT4_BITS
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.cli.flags import words_from
from swin_quant.quant.search import SearchResult
from swin_quant.verbs import calibrate, evaluate, export, search, verify
from swin_quant.verbs.calibrate import CalibrateOptions
from swin_quant.verbs.evaluate import EvaluateOptions
from swin_quant.verbs.evaluate_artifacts import write_cards
from swin_quant.verbs.export import ExportOptions
from swin_quant.verbs.export_target import exporter_options
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
from swin_quant.verbs.search_settings import SearchSettings
from swin_quant.verbs.verify import VerifyOptions


class Step(NamedTuple):
    """A verb with its options at that moment, and whether its result is there; `changed`: the options in which
    a result that is there differs."""

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


def steps(job: Quantization) -> list[Step]:
    """The steps of a job, in order."""
    calibrating = partial(is_calibrated, job), partial(_calibrate, job), partial(changed, job)
    found = [Step("calibrate", lambda: job.calibrating, *calibrating)]
    if job.search:
        found.append(Step("search", lambda: job.searching, partial(is_found, job), partial(_search, job)))
    found.append(Step("export", lambda: job.exporting, lambda: artifact_of(job) is not None, partial(_export, job)))
    if job.engine:
        found.append(Step("verify", lambda: job.verifying, partial(is_verified, job), partial(_verify, job)))
    if job.engine and job.has_val:
        found.append(Step("evaluate", lambda: job.scoring, partial(is_scored, job), partial(_score, job)))
    return found


def refuse_contradictions(job: Quantization) -> None:
    """UsageError for INT4 where no file of the target, or no rule of the policy, has weights to store so."""
    if job.options.int4_weights:
        exporter_options(job.target, "int8", {"int4_weights": True})
        if all(rule.bits is None or rule.bits > INT4_BITS for rule in job.policy.rules):
            name = job.policy.name
            raise UsageError(f"‹int4_weights›: policy {name} has no weights of {INT4_BITS} bits: give ‹policy› w4a16")


def check_before(job: Quantization) -> None:
    """Raise, before the first picture is read, for a package that a later step imports, a folder that cannot be written
    and labels that do not fit; warn of a sample that is too small for the budget of a search."""
    if all(step.is_done() for step in steps(job)):
        return
    job.target.exporting.check_packages()
    ensure_writable_dir(job.folder)
    if job.engine and job.has_val:
        job.scored_on  # noqa: B018  (opens them)
    if job.search and not is_found(job):
        job.search.tell_if_few(job.search.sampling.count)


def _calibrate(job: Quantization, options: CalibrateOptions) -> None:
    others = changed(job)
    usual = job.folder / f"{job.cfg.MODEL.NAME}_calib.pth"
    if others and usual.samefile(job.checkpoint):
        raise UsageError(
            f"{job.checkpoint}: what is asked for differs ({', '.join(others)}), and the result would be written "
            "over it: give another ‹output›"
        )
    calibrate.run(options, job.world)


def _search(job: Quantization, options: SearchOptions) -> None:
    settings = search.settings_of(options, str(job.calibrated), job.cfg, job.world)
    found = search.find_and_keep(search.costs_of(settings, settings.checkpoint))
    refuse_useless(settings, found, str(job.calibrated), job.target)


def refuse_useless(settings: SearchSettings, found: SearchResult, checkpoint: str, target: Backend) -> None:
    """SwinQuantError where a search kept no budget, or left every layer float."""
    if not found.met:
        raise SwinQuantError(
            f"the budget cannot be met ({settings.limits}): the best that was found is {found.file} "
            f"({found.found.figures})"
        )
    if found.is_float:
        raise SwinQuantError(
            f"within the budget ({settings.limits}) every layer stays float: loosen it, or deploy the float model: "
            f"`swin-quant export {shlex.quote(checkpoint)} --for {target.name} --precision float`"
        )


def _export(job: Quantization, options: ExportOptions) -> None:
    export.exported_as(options.backend, options, options.output_kind, options.onnx)


def _verify(job: Quantization, options: VerifyOptions) -> None:
    verify.refuse_failed(*verify.verified(options, job.world))


def _score(job: Quantization, options: EvaluateOptions) -> None:
    write_cards(evaluate.score_files(options, job.world))
