"""The steps of a quantization: which there are, what is done, how the others are done, and the verdict at the end."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx.options import INT4_BITS
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named
from swin_quant.base.arguments import as_command
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.distributed import this_world
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir, get_sha256
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.data.sources import TRAIN
from swin_quant.exported import SubjectFiles
from swin_quant.loading import ModelFile
from swin_quant.policies import PolicyChoice
from swin_quant.quant import DEFAULT_PERCENTILE, SEARCHED_ON
from swin_quant.quant.policy import Policy
from swin_quant.report.engines import Verification
from swin_quant.score.engine import HALF_TYPES
from swin_quant.verbs.calibrate import calibrate
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.export import export
from swin_quant.verbs.export_here import check_tunable
from swin_quant.verbs.export_target import ExportTarget, check_policy, exporter_options
from swin_quant.verbs.quantization import Quantization, changed
from swin_quant.verbs.search import search
from swin_quant.verbs.search_result import refuse_useless
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


def find_artifact(job: Quantization) -> Artifact | None:
    """The artifact of the calibrated checkpoint for the backend under the policy; None if missing or damaged."""
    if not job.is_calibrated or (policy := job.exported_policy) is None:
        return None
    sha256, exports = get_sha256(job.calibrated), job.target.exporting
    targets = (job.target.name, exports.fixed.get("target"))  # or an ONNX file for any engine
    float_type = job.float_type or exports.float_type
    for file in sorted(job.folder.glob("*.json")):
        try:
            card = RunCard.read(file)
            if card.artifact is None or card.checkpoint is None or card.checkpoint["sha256"] != sha256:
                continue
            options, tuned = card.artifact["options"], card.artifact.get("tuned")
            if job.tune or tuned:  # the one that took the least time on such a CPU
                is_chosen = job.tune and tuned is not None and tuned["cpu"] == cpu_kind()
            else:
                is_chosen = (card.policy or {}).get("rules") == policy.to_dict()["rules"]
            has_floats = "float_type" not in exports.flags or options.get("float_type", float_type) == float_type
            has_weights = bool(options.get("int4_weights")) == job.int4_weights
            is_ours = options.get("target", card.artifact["backend"]) in targets
            if is_ours and is_chosen and has_floats and has_weights:
                return open_artifact(file.with_name(card.artifact["file"]))
        except SwinQuantError:  # some other JSON, or a file that was changed: it is exported again
            continue
    return None


def steps(job: Quantization, unexported: Path = Path()) -> list[Step]:
    """The steps of a job as they are now, in order. `unexported`: the artifact's file while it is not there."""
    engine, device = job.engine, job.file.device
    timing = {"threads": job.threads, "float_type": job.float_type_asked}
    method: dict[str, Any] = {"method": job.method.name, "exact": job.method.exact, "passes": job.passes}
    method |= {"percentile": job.method.percentile} if job.method.percentile != DEFAULT_PERCENTILE else {}
    own, found = ModelFile(str(job.calibrated), device=device), find_artifact(job)
    file = str(found.file if found else unexported)

    def ran_in_type(precision: str) -> bool:
        """Whether an engine ran float layers in the wanted type; one that chooses it adds a half type to its precision,
        and `find_artifact` checks all others."""
        if found is None or engine is None or not engine_named(engine).float_types:
            return True
        if job.float_type_asked in HALF_TYPES:
            return precision.endswith(f"+{job.float_type_asked}")
        return precision not in [f"{found.record['precision']}+{half}" for half in HALF_TYPES]

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
        records = [one for one in found.card.verification if ran_in_type(one["precision"])] if found else []
        is_verified = bool(records) and bool(Verification(records, Path(file)))
        all_steps.append(Step("verify", verify, verifying, is_verified))
    if engine and job.has_val:
        scored = replace(job.asked, split=None, count=None, seed=None)
        scoring = {"model": SubjectFiles(files=(file,), device=device), "pictures": scored, "half": job.half}
        results = [one for one in found.card.measured() if one.policy and ran_in_type(one.precision)] if found else []
        is_scored = any(result.dataset == job.scored_on for result in results)
        all_steps.append(Step("evaluate", evaluate, {**scoring, "engine": (engine,), **timing}, is_scored))
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
    count, calibrated = len(steps(job)), None
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
            calibrated = calibrate(**arguments, folder=job.folder)
            calibrated.save_in(job.folder, this_world())
        elif step.name == "search":
            refuse_useless(search(**arguments), job.target, job.calibrated)
        elif step.name == "verify":
            verify(**arguments).check()
        elif step.name == "export" and calibrated and not (job.is_automatic or job.tune):
            export(**arguments | {"model": calibrated})  # as in its file, which need not be read
            calibrated = None
        else:
            step.function(**arguments)
    if (found := find_artifact(job)) is None:
        raise SwinQuantError(f"{job.folder}: holds no artifact of {job.calibrated.name} for {job.target.name}")
    return found


def tell_policy(card: RunCard | None, policy: Policy, is_chosen: bool) -> None:
    """Warn where a model that is calibrated gets another policy though none `is_chosen`."""
    before = card.policy if card and not is_chosen else None
    if before and before["rules"] != policy.to_dict()["rules"]:
        told = "%s is calibrated under policy %s: it is calibrated anew under %s, the backend's best; ‹policy› chooses"
        log.warning(told, card and card.name, before["name"], policy.name)


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
