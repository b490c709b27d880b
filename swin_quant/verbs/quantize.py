"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import shared
from swin_quant.cli.output import show
from swin_quant.verbs.quantize_options import QuantizeOptions

if TYPE_CHECKING:
    from swin_quant.backends.artifact import Artifact
    from swin_quant.base.distributed import World
    from swin_quant.report.verdict import DeployVerdict
    from swin_quant.verbs.quantization import Quantization

HELP = "From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."
EXAMPLES = """examples:
  swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
  swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out
  swin-quant quantize my.pth --cfg my.yaml --data-path data --for onnxruntime --pictures 160 --dry-run
  swin-quant quantize my.pth swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output family

The policy is the backend's best where none is named; auto is found by `search`. It goes on where it was cut off: a step
whose result lies in the output folder is not done again. Several checkpoints have a folder each below --output."""
OPTIONS = QuantizeOptions


def run(options: QuantizeOptions, world: World) -> None:
    from swin_quant.verbs.quantization import Quantization
    from swin_quant.verbs.quantize_steps import refuse_contradictions, steps

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
    show(scored, options.json, [verdict(named[name], artifact) for name, artifact in made.items()])
    if failed:
        raise failed[0]


def quantize_all(jobs: Mapping[str, Quantization]) -> tuple[dict[str, Artifact], list[SwinQuantError]]:
    """Each by its name, one after the other: the artifacts, and one error for all that failed; the rest go on."""
    from swin_quant.base.errors import memory_errors_named, one_line
    from swin_quant.base.progress import log

    made: dict[str, Artifact] = {}
    failed: dict[str, SwinQuantError] = {}
    for number, (name, one) in enumerate(jobs.items(), 1):
        if len(jobs) > 1:
            log.info("%d of %d: %s", number, len(jobs), name)
        try:
            with memory_errors_named():
                made[name] = quantize(one)
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


def quantize(job: Quantization) -> Artifact:
    """Do what is not done yet; the artifact with all that was measured in its card.

    SwinQuantError where the artifact does not compute what the model computes: it is then not scored.
    """
    from swin_quant.base.progress import log
    from swin_quant.verbs.quantize_steps import check_before, steps

    check_before(job)
    todo = steps(job)
    for number, step in enumerate(todo, 1):
        done = step.is_done()
        others = [] if done else step.changed()
        state = ": done before" if done else f": done again, for changed: {', '.join(others)}" if others else ""
        log.info("%d/%d %s%s", number, len(todo), step.command, state)
        if not done:
            step.do()
    return job.made


def verdict(job: Quantization, artifact: Artifact) -> DeployVerdict:
    """What to deploy; of a file that was not scored, why it was not."""
    from swin_quant.report.verdict import DeployVerdict, of_artifact

    target, file, data_path = job.target, artifact.file, job.cfg.DATA.DATA_PATH
    if found := of_artifact(artifact.card, file, job.calibrated, data_path):
        return found
    if job.engine is not None:
        return DeployVerdict(
            str(file), f"verified; not scored: {data_path} has no val split", f"swin-quant bench {file}"
        )
    engines = [target] if target.load else job.takers
    remedies = " or ".join(backend.remedy for backend in engines if backend.remedy)
    why = f"neither verified nor scored: {target.name} does not run its file here as it is ({remedies})"
    then = [step.format(file=file, checkpoint=job.calibrated) for step in target.exporting.next_step]
    return DeployVerdict(str(file), why, then[-1] if then else f"swin-quant inspect {file}")
