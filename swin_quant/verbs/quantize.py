"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swin_quant.arguments import checked
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import takers, target_named
from swin_quant.base.errors import SwinQuantError, UsageError, memory_errors_named, one_line
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cli import shared
from swin_quant.cli.flags import words_from
from swin_quant.cli.output import show_cards
from swin_quant.config.outputs import LOGITS
from swin_quant.quant import AUTO
from swin_quant.verbs import calibrate as calibrating
from swin_quant.verbs import evaluate as evaluating
from swin_quant.verbs import export as exporting
from swin_quant.verbs import search as searching
from swin_quant.verbs import verify as verifying
from swin_quant.verbs.calibrate import CalibrateOptions, SampleOptions
from swin_quant.verbs.evaluate import EvaluateOptions
from swin_quant.verbs.quantize_options import NO_SEARCH, QuantizeOptions
from swin_quant.verbs.search_options import Budget, SearchOptions, timed_backend
from swin_quant.verbs.verify import VerifyOptions

if TYPE_CHECKING:
    from torch import nn

    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.data.picture_set import Source
    from swin_quant.exported import Exported
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.report.verdict import DeployVerdict
    from swin_quant.verbs.evaluate import Evaluation
    from swin_quant.verbs.quantization import Quantization
    from swin_quant.verbs.search_costs import Search

EXAMPLES = """examples:
  swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
  swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out
  swin-quant quantize my.pth swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output family

The policy is the backend's best where none is named; auto is found by `search`. A step whose result lies in the output
folder is not done again. Several checkpoints have a folder each below --output."""


@dataclass(frozen=True)
class Quantized:
    """An artifact, and its results; printed, the accuracy-delta table and the verdict."""

    artifact: Exported
    evaluation: Evaluation

    @property
    def verdict(self) -> DeployVerdict:
        """The file to deploy, its cost in accuracy and gain in time, the next command."""
        assert self.evaluation.verdict is not None, "`quantize` always reaches one"
        return self.evaluation.verdict

    def __str__(self) -> str:
        return str(self.evaluation)

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_()


@checked
def quantize(
    model: Model | nn.Module | str | Path,
    pictures: Source,
    backend: str,
    folder: str | Path,
    policy: str | Policy | None = None,
    *,
    scored_on: Source | None = None,
    method: str | None = None,
    passes: str | Sequence[Any] | None = None,
    int4_weights: bool = False,
    tune: bool = False,
    budget: Budget = Budget(),
    config: str | Path | None = None,
) -> Quantized:
    """Calibrate, export for `backend` into `folder`, verify and score, as `swin-quant quantize` does.

    `policy` None: the backend's best; "auto" is searched for within the `budget`, as in `search`. `tune`: as in
    `export`. `pictures`, `method` and `passes` are those of
    `calibrate`; `scored_on` None: the place's val. A checkpoint's file with a place on disk goes on where a call was
    cut off. A model in memory is done anew, and is then calibrated. `config`: for a checkpoint whose model no run card
    or shape tells.
    SwinQuantError where the artifact does not compute what the model computes, and where the budget cannot be met.
    """
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.data.sources import place_has
    from swin_quant.exported import model_of
    from swin_quant.loading import load
    from swin_quant.quant.policy import load_policy
    from swin_quant.verbs.calibrate import calibrate
    from swin_quant.verbs.export import export
    from swin_quant.verbs.export_target import ExportTarget, check_policy
    from swin_quant.verbs.export_tuned import check_tunable
    from swin_quant.verbs.search import search

    source, target = source_of(pictures), target_named(backend)
    place = None
    if isinstance(source, PictureSet):
        place = source
        is_plain = isinstance(policy, str | None) and isinstance(passes, str | None) and scored_on is None
        if isinstance(model, str | Path) and is_plain:
            return _as_the_command(
                QuantizeOptions(
                    backend=backend,
                    checkpoint=(str(model),),
                    model=shared.ModelOptions(cfg=str(config) if config else None, opts=shared.upright_opts(source)),
                    data=shared.ScoringOptions(data_path=source.path),
                    sample=SampleOptions(source.count, source.split),
                    ranges=shared.RangeOptions(method),
                    passes=shared.PassOptions(passes),  # type: ignore[arg-type]  # `is_plain`
                    policy=shared.PolicyOptions((policy,) if policy else ()),  # type: ignore[arg-type]
                    budget=budget,
                    int4_weights=int4_weights,
                    tune=tune,
                    run=shared.RunOptions(seed=source.seed if isinstance(pictures, PictureSet) else None),
                    output=str(folder),
                )
            )
        if scored_on is None and place_has(source.path, "val"):
            scored_on = source.path
    if budget != Budget() and policy != AUTO:
        raise UsageError(NO_SEARCH)
    subject = model_of(load(model, config) if isinstance(model, str | Path) else model)
    target.exporting.check_packages()
    ensure_writable_dir(folder)
    best = target.exporting.policies_for(subject.card.config)[0]
    if tune:
        wanted = ExportTarget.of(backend, "int8", {"int4_weights": int4_weights})
        check_tunable(wanted, policy, replace(subject.card, policy=load_policy(best).to_dict()))
    named = policy if policy and policy != AUTO else best
    check_policy(target, load_policy(named))
    calibrate(subject, source, named, method=method, passes=passes, folder=folder)
    if policy == AUTO:
        searched_on = replace(place, count=None) if place else source
        refuse_useless(search(subject, searched_on, backend, folder, budget=budget), target, subject.checkpoint)
    exported = export(subject, backend, folder, int4_weights=int4_weights, tune=tune)
    scored = _checked(exported, target, source, scored_on)
    data = place.path if place else "DIR"
    unscored = f"{data} has no val split" if place else "no labelled pictures were given"
    said = scored.verdict or verdict_on(exported.artifact, target, subject.checkpoint, data, unscored)
    return Quantized(exported, replace(scored, verdict=said))


def _checked(exported: Exported, target: Backend, pictures: Source, scored_on: Source | None) -> Evaluation:
    """The artifact verified, on `pictures` if there are no labelled ones, and scored, where its engine is here.

    SwinQuantError where it does not compute what the model computes.
    """
    from swin_quant.verbs.evaluate import Evaluation, evaluate
    from swin_quant.verbs.export_target import engine_for
    from swin_quant.verbs.verify import refuse_failed, verify

    if not (engine := engine_for(target)):
        return Evaluation((), exported.card)
    refuse_failed(exported.artifact, verify(exported, pictures if scored_on is None else scored_on, engine).records)
    return Evaluation((), exported.card) if scored_on is None else evaluate(exported, scored_on, engine=engine)


def _as_the_command(options: QuantizeOptions) -> Quantized:
    from swin_quant.base.distributed import World
    from swin_quant.exported import Exported
    from swin_quant.verbs.evaluate import Evaluation
    from swin_quant.verbs.quantization import Quantization

    job = Quantization.of(options, options.checkpoint[0], World())
    refuse_contradictions(job)
    artifact = finish(job)
    card = artifact.card
    return Quantized(Exported(artifact), Evaluation(tuple(card.measured()), card, verdict=verdict(job, artifact)))


def run(options: QuantizeOptions, world: World) -> None:
    from swin_quant.verbs.quantization import Quantization

    shared.one_process(world, "quantize")
    several = len(options.checkpoint) > 1
    jobs = [Quantization.of(options, checkpoint, world, several) for checkpoint in options.checkpoint]
    named = {one.cfg.MODEL.NAME: one for one in jobs}
    if len(named) < len(jobs):
        raise UsageError("two checkpoints have one name, which would be their folder's: quantize them one by one")
    for one in jobs:
        refuse_contradictions(one)
    if options.dry_run:
        for one in jobs:
            for step in steps(one):
                print(step.command + ("    # done" if step.is_done() else ""))
        return
    made, failed = quantize_all(named)
    scored = [artifact.card for artifact in made.values() if artifact.card.results]
    show_cards(scored, options.json, [verdict(named[name], artifact) for name, artifact in made.items()])
    if failed:
        raise failed[0]


def quantize_all(jobs: Mapping[str, Quantization]) -> tuple[dict[str, Artifact], list[SwinQuantError]]:
    """Each by its name, one after the other: the artifacts, and one error for all that failed; the rest go on."""
    made: dict[str, Artifact] = {}
    failed: dict[str, SwinQuantError] = {}
    for number, (name, one) in enumerate(jobs.items(), 1):
        if len(jobs) > 1:
            log.info("%d of %d: %s", number, len(jobs), name)
        try:
            with memory_errors_named():
                made[name] = finish(one)
        except SwinQuantError as error:
            failed[name] = error
        except (RuntimeError, OSError) as error:  # by exporters and engines
            if len(jobs) == 1:
                raise
            failed[name] = SwinQuantError(one_line(f"{type(error).__name__}: {error}"))
        if name in failed and number < len(jobs):
            log.warning("%s: %s: going on with the next", name, failed[name])
    if len(jobs) == 1 or not failed:
        return made, list(failed.values())
    reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
    return made, [SwinQuantError(f"{len(failed)} of {len(jobs)} checkpoints failed: {reasons}")]


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


def steps(job: Quantization) -> list[Step]:
    """The steps of a job, in order."""
    from swin_quant.verbs.evaluate_artifacts import write_cards
    from swin_quant.verbs.quantization import artifact_of, changed, is_calibrated, is_found, is_scored, is_verified

    def verify(options: VerifyOptions) -> None:
        verifying.refuse_failed(*verifying.verified(options, job.world))

    def score(options: EvaluateOptions) -> None:
        write_cards(evaluating.score_files(options, job.world))

    calibrating = partial(is_calibrated, job), partial(_calibrate, job), partial(changed, job)
    found = [Step("calibrate", lambda: job.calibrating, *calibrating)]
    if job.is_automatic:
        found.append(Step("search", lambda: job.searching, partial(is_found, job), partial(_search, job)))
    found.append(Step("export", lambda: job.exporting, lambda: artifact_of(job) is not None, exporting.exported_as))
    if job.engine:
        found.append(Step("verify", lambda: job.verifying, partial(is_verified, job), verify))
    if job.engine and job.has_val:
        found.append(Step("evaluate", lambda: job.scoring, partial(is_scored, job), score))
    return found


def refuse_contradictions(job: Quantization) -> None:
    """UsageError for a policy that the target does not run, for INT4 where no file of the target, or no rule of the
    policy, has such weights, and for ‹tune› where the target or the model cannot have it."""
    from swin_quant.backends.onnx.options import INT4_BITS
    from swin_quant.verbs.export_target import ExportTarget, check_policy, exporter_options
    from swin_quant.verbs.export_tuned import check_tunable

    check_policy(job.target, job.policy)
    if job.is_automatic:
        timed_backend(job.target.name, job.world.device.type)
    if job.options.int4_weights:
        exporter_options(job.target, "int8", {"int4_weights": True})
        if all(rule.bits is None or rule.bits > INT4_BITS for rule in job.policy.rules):
            name = job.policy.name
            raise UsageError(f"‹int4_weights›: policy {name} has no weights of {INT4_BITS} bits: give ‹policy› w4a16")
    if job.options.tune:
        card = job.checkpoint.card
        before = replace(card, policy=job.policy.to_dict()) if card else None  # it is calibrated for that policy
        check_tunable(ExportTarget.of(job.target.name, "int8"), None, before, job.cfg.MODEL.OUTPUT_KIND)


def check_before(job: Quantization) -> None:
    """Raise, before the first picture is read, for a package that a later step imports, a folder that cannot be written
    and labels that do not fit; warn of a sample that is too small for the budget of a search."""
    from swin_quant.verbs.quantization import is_found

    if all(step.is_done() for step in steps(job)):
        return
    job.target.exporting.check_packages()
    ensure_writable_dir(job.folder)
    if job.engine and job.has_val:
        job.scored_on  # noqa: B018  (opens them)
    if job.is_automatic and not is_found(job):
        job.searching.budget.or_default.tell_if_few(job.searching.data.pictures)


def _calibrate(job: Quantization, options: CalibrateOptions) -> None:
    from swin_quant.verbs.quantization import changed

    others = changed(job)
    usual = job.folder / f"{job.cfg.MODEL.NAME}_calib.pth"
    if others and usual.samefile(job.checkpoint):
        raise UsageError(
            f"{job.checkpoint}: the options differ ({', '.join(others)}), and the result would be written "
            "over it: give another ‹output›"
        )
    calibrating.run(options, job.world)


def _search(job: Quantization, options: SearchOptions) -> None:
    from swin_quant.checkpoint import open_checkpoint

    found = searching.search_checkpoint(options, open_checkpoint(job.calibrated), job.cfg, job.world)
    refuse_useless(found, job.target, job.calibrated)


def refuse_useless(found: Search, target: Backend, checkpoint: Path) -> None:
    """SwinQuantError where a search kept no budget, or left every layer float."""
    if not found:
        raise SwinQuantError(f"{found.unmet} ({found.verdict.summary})")
    if not found.nodes:
        raise SwinQuantError(
            f"within the budget ({found.record['budget']}) every layer stays float: loosen it, or deploy the float "
            f"model: `swin-quant export {shlex.quote(str(checkpoint))} --for {target.name} --precision float`"
        )


def finish(job: Quantization) -> Artifact:
    """Do the steps that are not done yet; the artifact with all results in its card.

    SwinQuantError where the artifact does not compute what the model computes: it is then not scored.
    """
    check_before(job)
    todo = steps(job)
    for number, step in enumerate(todo, 1):
        done = step.is_done()
        others = [] if done else step.changed()
        state = ": done before" if done else f": done again, changed: {', '.join(others)}" if others else ""
        log.info("%d/%d %s%s", number, len(todo), step.command, state)
        if not done:
            step.run(step.options())
    return job.artifact


def verdict(job: Quantization, artifact: Artifact) -> DeployVerdict:
    """The verdict on the artifact of a job."""
    return verdict_on(
        artifact, job.target, job.calibrated, job.cfg.DATA.DATA_PATH, f"{job.cfg.DATA.DATA_PATH} has no val split"
    )


def verdict_on(artifact: Artifact, target: Backend, checkpoint: Path, data: str, unscored: str) -> DeployVerdict:
    """The file to deploy; `unscored` says why one that its engine runs was not scored."""
    from swin_quant.report.verdict import DeployVerdict, of_artifact
    from swin_quant.verbs.export_target import engine_for

    file, wrapped = artifact.file, artifact.card.wrapped
    if found := of_artifact(artifact.card, file, checkpoint, data):
        return found
    if engine_for(target) is not None:
        kind = artifact.card.config.get("MODEL", {}).get("OUTPUT_KIND", LOGITS)
        has_classes = bool(wrapped.get("classes")) if wrapped else kind == LOGITS
        said = f"not scored: {unscored}" if has_classes else "it gives no classes, whose accuracy could be scored"
        return DeployVerdict(str(file), f"verified; {said}", f"swin-quant bench {file}")
    engines = [target] if target.load else takers(target.exporting.artifact)
    remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
    why = f"neither verified nor scored: {target.name} does not run its file here as it is ({remedies})"
    then = [step.format(file=file, checkpoint=checkpoint) for step in target.exporting.next_step]
    return DeployVerdict(str(file), why, then[-1] if then else f"swin-quant inspect {file}")
