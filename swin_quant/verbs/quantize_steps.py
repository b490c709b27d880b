"""The steps of a quantization: which there are, what is done, how the others are done, and the verdict at the end."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend
from swin_quant.backends.onnx.options import INT4_BITS
from swin_quant.backends.registry import takers
from swin_quant.base.arguments import as_command
from swin_quant.base.distributed import this_world
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.data.sources import TRAIN
from swin_quant.exported import SubjectFiles
from swin_quant.loading import ModelFile
from swin_quant.policies import PolicyChoice
from swin_quant.quant import DEFAULT_PERCENTILE, SEARCHED_ON
from swin_quant.report.next_command import TIME, Abilities, after_export, fill
from swin_quant.report.verdict import DeployVerdict, artifact_verdict
from swin_quant.verbs.calibrate import calibrate
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.export import export
from swin_quant.verbs.export_target import ExportTarget, check_policy, engine_for, exporter_options
from swin_quant.verbs.export_tuned import check_tunable
from swin_quant.verbs.quantization import Quantization, changed
from swin_quant.verbs.quantized_before import find_artifact, is_scored, is_verified
from swin_quant.verbs.search import search
from swin_quant.verbs.search_result import Search
from swin_quant.verbs.timing import timed_backend
from swin_quant.verbs.verify import verify


class Step(NamedTuple):
    """A verb with its arguments, and whether its result is there; `changed`: in what a result that is
    there differs."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    is_done: bool
    changed: Sequence[str] = ()
    more: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return as_command(self.name, self.function, *self.more, **self.arguments)


def steps(job: Quantization, unexported: Path = Path()) -> list[Step]:
    """The steps of a job as they are now, in order. `unexported`: the artifact's file while it is not there."""
    engine, device = job.engine, job.file.device
    timing = {"threads": job.threads, "float_type": job.float_type_asked}
    method: dict[str, Any] = {"method": job.method.name, "exact": job.method.exact, "passes": job.passes}
    method |= {"percentile": job.method.percentile} if job.method.percentile != DEFAULT_PERCENTILE else {}
    own, found = ModelFile(str(job.calibrated), device=device), find_artifact(job)
    file = str(found.file if found else unexported)
    calibrating = {"model": job.file, "pictures": job.asked, "policy": job.calibrated_under, **method}
    done, output = job.is_calibrated, ("--output", shlex.quote(str(job.folder)))
    all_steps = [Step("calibrate", calibrate, calibrating, done, () if done else changed(job) or (), output)]
    if job.is_automatic:
        searched = replace(job.asked, count=None, batch=None)
        searching = {"model": own, "pictures": searched, "engine": job.target.name, "folder": job.folder}
        searching |= {"budget": job.budget.or_default, **timing}
        all_steps.append(Step("search", search, searching, done and job.exported_policy is not None))
    policy = PolicyChoice((str(job.found_file),)) if job.is_automatic else job.calibrated_under
    exporting = {"model": ModelFile(own.checkpoint), "backend": job.target.name, "folder": job.folder}
    exporting |= {"policy": None if job.tune else policy, "float_type": job.float_type}
    exporting |= {"int4_weights": job.int4_weights, "tune": job.tune}
    all_steps.append(Step("export", export, exporting, found is not None))
    if engine:
        shown = replace(job.asked, split="val" if job.has_val else TRAIN, count=None, batch=None, seed=None)
        verifying = {"artifact": file, "pictures": shown, "engine": (engine,), **timing, "device": device}
        all_steps.append(Step("verify", verify, verifying, is_verified(job)))
    if engine and job.has_val:
        scored = replace(job.asked, split=None, count=None, seed=None)
        scoring = {"model": SubjectFiles(files=(file,), device=device), "pictures": scored, "half": job.half}
        all_steps.append(Step("evaluate", evaluate, {**scoring, "engine": (engine,), **timing}, is_scored(job)))
    return all_steps


def finish(job: Quantization) -> Artifact:
    """Do the steps that are not done yet.

    Returns:
        The artifact with all results in its card.

    Raises:
        SwinQuantError: The artifact does not compute what the model computes: it is then not scored.
    """
    if not all(step.is_done for step in steps(job)):
        job.target.exporting.check_packages()
        ensure_writable_dir(job.folder)
        if job.engine and job.has_val:
            job.scored_on  # noqa: B018  (opens them: labels that do not fit are told before the first picture is read)
        if job.is_automatic and not (job.is_calibrated and job.exported_policy):
            job.budget.or_default.tell_if_few(SEARCHED_ON)
    count = len(steps(job))
    for number in range(count):
        step = steps(job)[number]
        state = ": done before" if step.is_done else ""
        state = f": done again, changed: {', '.join(step.changed)}" if step.changed else state
        log.info("%d/%d %s%s", number + 1, count, step.command, state)
        if step.is_done:
            continue
        arguments = step.arguments
        if step.name == "calibrate":
            usual = job.folder / f"{job.cfg.MODEL.NAME}_calib.pth"
            if step.changed and usual.samefile(job.checkpoint):
                raise UsageError(
                    f"{job.checkpoint}: the options differ ({', '.join(step.changed)}), and the result would be "
                    "written over it: give another ‹output›"
                )
            calibrate(**arguments, folder=job.folder).save_in(job.folder, this_world())
        elif step.name == "search":
            refuse_useless(search(**arguments), job.target, job.calibrated)
        elif step.name == "verify":
            verify(**arguments).check()
        else:
            step.function(**arguments)
    if (found := find_artifact(job)) is None:
        raise SwinQuantError(f"{job.folder}: holds no artifact of {job.calibrated.name} for {job.target.name}")
    return found


def refuse_contradictions(job: Quantization) -> None:
    """UsageError for a policy that the target does not run, for INT4 where no file of the target, or no rule of the
    policy, has such weights, and for ‹tune› where the target or the model cannot have it."""
    job.float_type  # noqa: B018  (a type that nothing has is refused before any work)
    check_policy(job.target, job.policy)
    if job.is_automatic:
        timed_backend(job.target.name, this_world().device.type)
    if job.int4_weights:
        exporter_options(job.target, "int8", {"int4_weights": True})
        if all(rule.bits is None or rule.bits > INT4_BITS for rule in job.policy.rules):
            name = job.policy.name
            raise UsageError(f"‹int4_weights›: policy {name} has no weights of {INT4_BITS} bits: give ‹policy› w4a16")
    if job.tune:
        card = job.checkpoint.card
        before = replace(card, policy=job.policy.to_dict()) if card else None  # it is calibrated for that policy
        check_tunable(ExportTarget.parse(job.target.name, "int8"), None, before, job.cfg.MODEL.OUTPUT_KIND)


def refuse_useless(found: Search, target: Backend, checkpoint: Path) -> None:
    """SwinQuantError where a search kept no budget, or left every layer float."""
    if not found:
        raise SwinQuantError(f"{found.unmet} ({found.verdict.summary})")
    if not next(one["nodes"] for one in found.record["tried"] if one["found"]):
        raise SwinQuantError(
            f"within the budget ({found.record['budget']}) every layer stays float: loosen it, or deploy the float "
            f"model: `swin-quant export {shlex.quote(str(checkpoint))} --for {target.name} --precision float`"
        )


def verdict_on(artifact: Artifact, target: Backend, checkpoint: Path, data: str, unscored: str) -> DeployVerdict:
    """The file to deploy; `unscored` says why one that its engine runs was not scored."""
    file = artifact.file
    if found := artifact_verdict(artifact.card, file, checkpoint, data):
        return found
    if engine_for(target) is not None:
        has_classes = Abilities.from_card(artifact.card).has_classes
        said = f"not scored: {unscored}" if has_classes else "it gives no classes, whose accuracy could be scored"
        return DeployVerdict(str(file), f"verified; {said}", fill(TIME, file=file))
    engines = [target] if target.load else takers(target.exporting.artifact)
    remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
    why = f"neither verified nor scored: {target.name} does not run its file here as it is ({remedies})"
    then = after_export(artifact.card, file, target, data)
    return DeployVerdict(str(file), why, then[-1] if then else fill("swin-quant show {file}", file=file))
