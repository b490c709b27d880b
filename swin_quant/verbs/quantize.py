"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from swin_quant.arguments import checked
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import engine_named, target_named
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.distributed import one_process, this_world
from swin_quant.base.errors import UsageError, called_in_python
from swin_quant.base.files import ensure_writable_dir
from swin_quant.cards.card import RunCard
from swin_quant.data.picture_set import PictureSet, Source, asked_for
from swin_quant.exported import Exported, SubjectFiles
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import AUTO, SEARCHED_ON
from swin_quant.quant.calibration import Method
from swin_quant.report.engines import Verification
from swin_quant.report.verdict import DeployVerdict, export_verdict
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.calibrate import calibrate, plan_passes
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.evaluation import Evaluated, Evaluation
from swin_quant.verbs.export import export
from swin_quant.verbs.export_target import engine_for, float_type_options
from swin_quant.verbs.quantize_plan import check_target, make_plan, refuse_contradictions
from swin_quant.verbs.quantize_steps import Steps, hash_files
from swin_quant.verbs.search import search
from swin_quant.verbs.search_costs import Budget, policy_file, refuse_useless
from swin_quant.verbs.verify import verify

EXAMPLES = """swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out"""


@dataclass(frozen=True)
class Quantized(Evaluated):
    """An artifact, and its results; printed, the accuracy-delta table and the verdict."""

    artifact: Exported

    @property
    def verdict(self) -> DeployVerdict:
        """The file to deploy, its cost in accuracy and gain in time, the next command."""
        assert self.evaluation.verdict is not None, "`quantize` always reaches one"
        return self.evaluation.verdict


@checked
def quantize(
    model: Annotated[Model | nn.Module | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[Source, Fields(PictureSet, "pictures", without=("images",))],
    backend: Annotated[str, Parameter(name="--for")],
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    scored_on: Annotated[Source | None, Parameter(parse=False)] = None,
    method: Annotated[str | None, Parameter(name="--calibrator")] = None,
    percentile: float | None = None,
    exact: bool = False,
    passes: str | Sequence[Any] | None = None,
    budget: Annotated[Budget, Fields(Budget, "budget of --policy auto")] = Budget(),
    int4_weights: bool = False,
    tune: bool = False,
    float_type: Literal["float32", "bfloat16", "float16"] | None = None,
    threads: int | None = None,
    half: Literal["auto", "none", "float16", "bfloat16"] = "auto",
    score_pictures: int | None = None,
    dry_run: bool = False,
    config: Annotated[str | Path | None, Parameter(parse=False)] = None,
) -> Quantized | None:
    """Calibrate, export for a backend, verify and score: from a float checkpoint to a file to deploy, and a verdict.

    Steps whose results are in the output folder are skipped, so an interrupted run continues. A model in
    memory is done anew, and is then calibrated.

    Args:
        model: A model, or a checkpoint of any publisher.
        pictures: A place on disk, whose training pictures calibrate and whose val scores, or batches.
        backend: backend that will run it: onnxruntime, openvino, tensorrt, fastertransformer, cuda, torchscript,
            onnx, executorch
        folder: folder of the results (default: output/<NAME>)
        policy: Default: the backend's best, with weights of 7 bits where its products would saturate on this CPU; auto:
            `search` finds one within the budget.
        scored_on: Pictures that score, in place of the place's val.
        method: how ranges are found: max, percentile, mse or entropy (default: by bits)
        percentile: percentile of values that a range covers (default 99.99); chooses the calibrator percentile
        exact: count every value, not a sample of each picture
        passes: corrections after calibration: a recipe (fast, best, ...) or its file, or none (default: equalize,
            where there are outlier channels)
        budget: Of a search; without a limit of the loss, 0.1 points of top-1.
        int4_weights: ONNX: store 4-bit weights as INT4, of a policy that has some (w4a16, w4a8)
        tune: openvino: try policies and operators here, keep the fastest
        float_type: type of float layers (default float32; GPUs float16)
        threads: threads of the engine (default: its own choice)
        half: type in which the float model is scored, too; auto: the device's
        score_pictures: how many pictures of val score, a seeded sample (default: all)
        dry_run: print the steps, as commands, and do nothing
        config: For a checkpoint whose model no run card or shape tells.

    Returns:
        The artifact with its results and the verdict.

    Raises:
        SwinQuantError: The artifact does not compute what the model computes, or the budget cannot be met.
        UsageError: Options that contradict each other.
    """
    one_process("quantize")
    choice = PolicyChoice((policy,) if policy else ()) if isinstance(policy, str | None) else policy
    refuse_contradictions(choice, budget != Budget(), tune, bool(float_type or int4_weights))
    EngineOptions(threads=threads)  # what is impossible is refused now, not by a later step
    if score_pictures is not None and score_pictures < 1:
        raise UsageError(f"‹score_pictures› {score_pictures}: must be at least 1")
    plan_passes(passes)
    with called_in_python(calibrator="method"):
        Method.choose(method, percentile)
    is_searched = isinstance(choice, PolicyChoice) and choice.policy == (AUTO,)
    if not is_searched and (not isinstance(choice, PolicyChoice) or choice.policy):
        one_policy(choice)  # a wrong name is told before pictures are read
    if isinstance(model, str | Path):
        model = ModelFile(str(model), cfg=str(config) if config else None)
    elif config and not isinstance(model, ModelFile):
        raise UsageError("‹config› is for a checkpoint: a model in memory has its own")
    source, target = asked_for(PictureSet() if pictures is None else pictures), target_named(backend)
    plan = make_plan(model, source, target, choice, passes, scored_on, score_pictures, tune)
    engine = engine_for(target)
    files, place, subject = plan.files, plan.place, plan.subject
    if files is None and dry_run:
        raise UsageError("‹dry_run› prints commands, which name files: give a checkpoint, a place and named options")
    float_types = float_type_options(target, engine_named(engine) if engine else None, float_type)
    check_target(plan, target, is_searched, int4_weights, tune)
    folder = Path(folder or Path("output", plan.name))
    calibrated = files.calibrated_file(folder, plan.used) if files else folder
    file = folder / files.expected_file(plan.used, target, int4_weights) if files else folder
    read = files.hash_calibration(plan.used, passes) if files else {}
    is_scored = engine is not None and plan.scored is not None
    read_val = {"the pictures": files.hash_scored()} if files and is_scored else {}
    if not dry_run:
        target.exporting.check_packages()
        ensure_writable_dir(folder, keep=False)
        if is_searched and place:
            budget.or_default.tell_if_few(SEARCHED_ON)
    count = 2 + is_searched + bool(engine) + is_scored
    steps = Steps(folder / f"{plan.name}.steps" if files else None, count, dry_run)
    device: Any = subject.device if files else "auto"
    timing: dict[str, Any] = {"threads": threads, "float_type": float_type}
    how: dict[str, Any] = {"model": subject, "pictures": plan.pictures, "policy": plan.policy, "passes": passes}
    how |= {"method": method, "percentile": percentile, "exact": exact}

    def save(made: Model) -> None:
        made.save_in(folder, this_world())

    output, then = ("--output", shlex.quote(str(folder))), save if files else None
    calibrated, made = steps.run(calibrate, how, read, calibrated, *output, then=then)
    own, read, used = ModelFile(str(calibrated)) if files else made, hash_files(calibrated), plan.policy
    if is_searched:
        drawn = replace(place, count=None, batch=None) if place else source
        how = {"model": replace(own, device=device) if files else made, "pictures": drawn, "folder": folder}
        how |= {"engine": target.name, "budget": budget.or_default, **timing}
        found, _ = steps.run(search, how, read, policy_file(folder, plan.name, target.name), then=refuse_useless)
        used, read = PolicyChoice((str(found),)), hash_files(calibrated, found)
    read |= {"the CPU": str(cpu_kind())} if tune else {}
    how = {"model": own, "backend": target.name, "folder": folder, "policy": None if tune else used}
    how |= {"int4_weights": int4_weights, "tune": tune, **float_types}
    file, exported = steps.run(export, how, read, file, replaces=True)
    on_engine = {"engine": (engine,), **timing}
    if engine:
        how = {"artifact": str(file) if files else exported, "pictures": plan.shown, "device": device, **on_engine}
        done: dict[str, Any] = {"then": Verification.check, "has_results": lambda card: card.verification}
        steps.run(verify, how, hash_files(file), file, **done)
    if is_scored:
        scored = SubjectFiles(files=(str(file),), device=device) if files else exported
        how = {"model": scored, "pictures": plan.scored, "half": half, **on_engine}
        steps.run(evaluate, how, hash_files(file) | read_val, file, has_results=RunCard.measured)

    data = place.path if place else "DIR"
    unscored = f"{data} has no val split" if place else "no labelled pictures were given"
    if dry_run:
        if engine and not is_scored:
            print(f"# not scored: {unscored}")
        return None
    artifact = open_artifact(file)
    checkpoint = calibrated if files else subject.checkpoint
    verdict = export_verdict(artifact, target, engine, checkpoint, data, unscored)
    results = Evaluation(tuple(artifact.card.measured()), artifact.card, verdict=verdict)
    return Quantized(results, Exported(artifact, exported.origin if exported else None))
