"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate.

Each step leaves files that say what they are of, so that a run which was cut off goes on where it stopped, and one that
is complete only shows its table.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from shlex import quote
from typing import NamedTuple

from swin_quant.backends.artifact import Artifact
from swin_quant.base.errors import SwinQuantError, UsageError, memory_errors_named, one_line
from swin_quant.base.progress import log
from swin_quant.data.sources import has_split, open_unlabelled
from swin_quant.tasks.quantization import (
    VAL,
    Quantization,
    artifact_of,
    changed,
    is_calibrated,
    is_scored,
    is_verified,
)
from swin_quant.tasks.search import search
from swin_quant.verbs.calibrate import calibrate_checkpoint
from swin_quant.verbs.evaluate_artifacts import Scoring, score_artifacts, write_cards
from swin_quant.verbs.export import export_checkpoint
from swin_quant.verbs.verify import Verifying, failures, verify_artifact

ARTIFACT = "ARTIFACT"
_OF_SCORING = ("DATA_PATH", "ZIP_MODE", "BATCH_SIZE", "NUM_WORKERS", "CACHE_MODE")


class Step(NamedTuple):
    """One step: the command that does the same, whether its result is there, what does it, and in what its result is
    of something else, if one is there."""

    command: str
    is_done: Callable[[], bool]
    do: Callable[[], object]
    changed: Callable[[], list[str] | None] = list


def steps(asked: Quantization) -> list[Step]:
    """What is to be done, in order; the artifact is called ARTIFACT, since its exporter names it."""

    def command(verb: str, subject: object, *words: str) -> str:
        told = ("swin-quant", verb, quote(str(subject)), *words, asked.words.get(verb, ""))
        return " ".join(word for word in told if word)

    data = f"--data-path {quote(asked.cfg.DATA.DATA_PATH)}" + (" --zip" if asked.cfg.DATA.ZIP_MODE else "")
    policy = f"--policy {quote(asked.policy_word or asked.base.name)}"
    safe = "--saturation-safe" if asked.saturation_safe else ""
    floats = " ".join(f"--float-type {float_type}" for float_type in asked.told_exporter.values())
    folder = f"--output {quote(str(asked.folder))}"
    count, passes = asked.plan.batches * asked.plan.batch_size, asked.plan.passes.words
    found = [
        Step(command("calibrate", asked.checkpoint, data, policy, safe, f"--pictures {count}{passes}", "--no-eval",
                     folder),
             partial(is_calibrated, asked), partial(_calibrate, asked), partial(changed, asked)),
    ]  # fmt: skip
    if searching := asked.searching:
        engine = f"--engine {asked.backend}"
        found.append(
            Step(command("search", asked.calibrated, data, engine, *searching.flags, folder),
                 lambda: is_calibrated(asked) and asked.exported is not None, partial(_search, asked))
        )  # fmt: skip
        policy = f"--policy {quote(str(searching.place))}"
    found += [
        Step(command("export", asked.calibrated, f"--for {asked.backend}", policy, safe, floats, folder),
             lambda: artifact_of(asked) is not None, partial(_export, asked)),
    ]  # fmt: skip
    if asked.engine is None:
        return found
    shown = VAL if has_split(asked.cfg, VAL) else asked.plan.split
    found.append(
        Step(command("verify", ARTIFACT, f"--engine {asked.engine}", data, f"--split {shown}"),
             partial(is_verified, asked), partial(_verify, asked, shown))
    )  # fmt: skip
    if shown == VAL:
        found.append(
            Step(command("evaluate", ARTIFACT, f"--engine {asked.engine}", data),
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
        others = [] if done else step.changed()
        said = ": done before" if done else f": done again, for changed: {', '.join(others)}" if others else ""
        log.info("%d/%d %s%s", number, len(todo), _with_file(step.command, asked), said)
        if not done:
            step.do()
    if asked.engine is None:
        engines = [asked.target] if asked.target.load else asked.takers
        remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
        log.warning("neither verified nor scored: %s does not run its file here as it is (%s)", asked.backend, remedies)
        for command in asked.target.exporting.next_step:
            log.info("next: %s", _with_file(command.format(file=ARTIFACT, checkpoint=asked.calibrated), asked))
    elif not has_split(asked.cfg, VAL):
        log.warning("not scored: %s has no %s split", asked.cfg.DATA.DATA_PATH, VAL)
    made = artifact_of(asked)
    if made is None:
        raise SwinQuantError(f"{asked.folder}: the artifact is gone")
    return made


def _with_file(command: str, asked: Quantization) -> str:
    """With the name of the artifact, once it is there."""
    made = artifact_of(asked) if ARTIFACT in command else None
    return command.replace(ARTIFACT, quote(str(made.file))) if made else command


def quantize_all(asked: Mapping[str, Quantization]) -> tuple[dict[str, Artifact], list[SwinQuantError]]:
    """Each by its name, one after the other: what was made, and one error for all that failed; others go on."""
    made: dict[str, Artifact] = {}
    failed: dict[str, SwinQuantError] = {}
    for number, (name, one) in enumerate(asked.items(), 1):
        if len(asked) > 1:
            log.info("%d of %d: %s", number, len(asked), name)
        try:
            with memory_errors_named():
                made[name] = quantize(one)
        except SwinQuantError as error:
            failed[name] = error
        except (RuntimeError, OSError) as error:  # what exporters and engines raise
            if len(asked) == 1:
                raise
            failed[name] = SwinQuantError(one_line(f"{type(error).__name__}: {error}"))
        if name in failed and number < len(asked):
            log.warning("%s: %s: going on with the next", name, failed[name])
    if len(asked) == 1 or not failed:
        return made, list(failed.values())
    reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
    return made, [SwinQuantError(f"{len(failed)} of {len(asked)} checkpoints failed: {reasons}")]


def _calibrate(asked: Quantization) -> None:
    others = changed(asked)
    if others and asked.usual.samefile(asked.checkpoint):
        raise UsageError(
            f"{asked.checkpoint}: what is asked for differs ({', '.join(others)}), and the result would be written "
            "over it: give another ‹output›"
        )
    calibrate_checkpoint(asked.cfg, asked.checkpoint, asked.chosen, asked.plan, asked.folder, asked.world)


def _search(asked: Quantization) -> None:
    searching = asked.searching
    if searching is None:
        return
    found = search(searching)
    if not found.met:
        raise SwinQuantError(
            f"the budget cannot be met ({searching.limits}): the best that was found is {searching.place} "
            f"({found.found.figures})"
        )
    if found.is_float:
        raise SwinQuantError(
            f"within the budget ({searching.limits}) every layer stays float: loosen it, or deploy the float model: "
            f"`swin-quant export {quote(str(asked.calibrated))} --for {asked.backend} --precision float`"
        )


def _export(asked: Quantization) -> None:
    export_checkpoint(asked.calibrated, asked.backend, asked.folder, policy=asked.exported,
                      options=asked.told_exporter, saturation_safe=asked.saturation_safe)  # fmt: skip


def _verify(asked: Quantization, split: str) -> None:
    made = _made(asked)
    how = Verifying(_named(asked), asked.options, str(asked.calibrated), workers=asked.cfg.DATA.NUM_WORKERS,
                    max_unreadable=asked.plan.max_unreadable)  # fmt: skip
    records = verify_artifact(made, partial(open_unlabelled, asked.cfg, split), how, asked.world)
    if failed := failures(records):
        raise SwinQuantError(f"{made.file}: verification failed: {'; '.join(failed)}")


def _score(asked: Quantization) -> None:
    data = {f"DATA.{key}": asked.cfg.DATA[key] for key in _OF_SCORING}
    scoring = Scoring(_named(asked), asked.options, data, str(asked.calibrated), VAL, asked.half,
                      max_unreadable=asked.plan.max_unreadable)  # fmt: skip
    write_cards(score_artifacts([_made(asked)], scoring, asked.world))


def _made(asked: Quantization) -> Artifact:
    made = artifact_of(asked)
    if made is None:
        raise SwinQuantError(f"{asked.folder}: holds no artifact of {asked.calibrated.name} for {asked.backend}")
    return made


def _named(asked: Quantization) -> Sequence[str] | None:
    return [asked.engine] if asked.engine else None
