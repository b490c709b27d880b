"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from swin_quant.arguments import checked
from swin_quant.backends.registry import engine_named, target_named
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import UsageError, called_in_python
from swin_quant.base.files import ensure_writable_dir
from swin_quant.data.picture_set import PictureSet, Source, asked_for
from swin_quant.data.sources import TRAIN, place_has
from swin_quant.exported import Exported, open_model
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import AUTO
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import load_policy
from swin_quant.report.verdict import DeployVerdict, export_verdict
from swin_quant.verbs.calibrate import calibrate
from swin_quant.verbs.evaluate import evaluate
from swin_quant.verbs.evaluation import Evaluated, Evaluation
from swin_quant.verbs.export import export
from swin_quant.verbs.export_here import check_tunable
from swin_quant.verbs.export_target import ExportTarget, check_policy, engine_for, float_type_options
from swin_quant.verbs.quantization import Quantization
from swin_quant.verbs.quantize_steps import finish, refuse_contradictions, steps, tell_policy
from swin_quant.verbs.search import search
from swin_quant.verbs.search_result import Budget, refuse_useless
from swin_quant.verbs.verify import verify

EXAMPLES = """swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out"""


@dataclass(frozen=True)
class Quantized(Evaluated):
    """An artifact, and its results; printed, the accuracy-delta table and the verdict."""

    artifact: Exported
    evaluation: Evaluation

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
        policy: Default: the backend's best; auto: `search` finds one within the budget.
        scored_on: Pictures that score, in place of the place's val.
        method: how ranges are found: max, percentile, mse, entropy; auto: node by node, by its cost (default: by bits)
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
    is_searched = isinstance(choice, PolicyChoice) and choice.policy == (AUTO,)
    if budget != Budget() and not is_searched:
        raise UsageError(f"a budget needs ‹policy› {AUTO}, which searches for a policy that keeps it")
    if tune and (choice != PolicyChoice() or float_type or int4_weights):
        raise UsageError(
            "‹tune› chooses the policy, and times files in the engine's fastest types: leave ‹policy› and what changes "
            "one, ‹float_type› and ‹int4_weights› out"
        )
    if isinstance(choice, PolicyChoice):
        if len(choice.policy) > 1:
            raise UsageError(f"--policy {' '.join(choice.policy)}: give one")
        if is_searched and choice.saturation_safe:
            raise UsageError("--saturation-safe: a search measures policies as they are: leave it out")
        if is_searched and choice != PolicyChoice((AUTO,)):
            change = next(one.name for one in fields(choice) if one.name != "policy" and getattr(choice, one.name))
            told = "is for a policy with a name: calibrate, then `search --policy NAME` with it"
            raise UsageError(f"--policy {AUTO}: ‹{change}› {told}")
    given = asked_for(PictureSet() if pictures is None else pictures)
    source = given.settled() if isinstance(given, PictureSet) else given
    target = target_named(backend)
    with called_in_python(calibrator="method"):
        kind = "percentile" if method is None and percentile is not None else method
        found_by = Method(kind, exact=exact) if percentile is None else Method(kind, percentile, exact)
    if isinstance(model, str | Path):
        model = ModelFile(str(model), cfg=str(config) if config else None)
    if isinstance(model, ModelFile) and isinstance(pictures, PictureSet) and pictures.upright is not None:
        model = replace(model, opts=(*model.opts, "DATA.UPRIGHT", str(pictures.upright)))
    is_plain = isinstance(passes, str | None) and scored_on is None
    if is_plain and isinstance(choice, PolicyChoice) and isinstance(model, ModelFile) and isinstance(given, PictureSet):
        cfg = model.config()
        model.need_checkpoint().forget()
        output = Path(folder or Path("output", cfg.MODEL.NAME))
        settled = given.settled(cfg)
        asked = replace(given, path=settled.path, zip_mode=settled.zip_mode or None)
        if not settled.path or (not place_has(settled.path, TRAIN) and not Path(settled.path).exists()):
            settled.with_default_split(TRAIN).open()  # says what is missing, before a policy compiles operators
        wanted = (choice, found_by, passes if isinstance(passes, str) else None, budget, int4_weights, tune)
        job = Quantization(model, cfg, output, target, settled, asked, *wanted, float_type, threads, half)
        refuse_contradictions(job)
        tell_policy(job.checkpoint.card, job.policy, is_chosen=bool(job.choice.policy))
        if dry_run:
            for step in steps(job, job.exported_file):
                print(step.command + ("    # done" if step.is_done else ""))
            if job.engine and not job.has_val:
                print(f"# not scored: {settled.path} has no val split")
            return None
        made = finish(job)
        verdict = export_verdict(
            made, target, job.engine, job.calibrated, settled.path, f"{settled.path} has no val split"
        )
        return Quantized(Exported(made), Evaluation(tuple(made.card.measured()), made.card, verdict=verdict))
    if dry_run:
        raise UsageError("‹dry_run› prints commands, which name files: give a checkpoint, a place and named options")
    if config and not isinstance(model, ModelFile):
        raise UsageError("‹config› is for a checkpoint: a model in memory has its own")
    subject = model.load() if isinstance(model, ModelFile) else open_model(model)
    engine = engine_for(target)
    exporting: dict[str, Any] = {"int4_weights": int4_weights, "tune": tune}
    exporting |= float_type_options(target, engine_named(engine) if engine else None, float_type)
    place, folder = source if isinstance(source, PictureSet) else None, folder or Path("output", subject.name)
    if place and scored_on is None and place_has(place.path, "val", bool(place.zip_mode)):
        scored_on = replace(place, split=None, count=None, seed=None)
    target.exporting.check_packages()
    ensure_writable_dir(folder)
    own = None if is_searched else one_policy(policy)
    named = own or load_policy(target.exporting.policies_for(subject.card.config)[0])
    tell_policy(subject.card, named, is_chosen=is_searched or own is not None)
    if tune:
        tuned = ExportTarget.parse(target.name, "int8", {"int4_weights": int4_weights})
        check_tunable(tuned, own, replace(subject.card, policy=named.to_dict()))
    check_policy(target, named)
    calibrate(subject, source, named, method=method, percentile=percentile, exact=exact, passes=passes, folder=folder)
    timing: dict[str, Any] = {"threads": threads, "float_type": float_type}
    if is_searched:
        searched_on = replace(place, count=None) if place else source
        found = search(subject, searched_on, target.name, folder, budget=budget, **timing)
        refuse_useless(found, target, subject.checkpoint)
    exported = export(subject, target.name, folder, **exporting)
    scored = Evaluation((), exported.card)
    if engine:
        verify(exported, source if scored_on is None else scored_on, engine, **timing).check()
        if scored_on is not None:
            scored = evaluate(exported, scored_on, engine=engine, half=half, **timing)
    data = place.path if place else "DIR"
    unscored = f"{data} has no val split" if place else "no labelled pictures were given"
    verdict = scored.verdict or export_verdict(exported.artifact, target, engine, subject.checkpoint, data, unscored)
    return Quantized(exported, replace(scored, verdict=verdict))
