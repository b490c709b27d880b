"""From a float checkpoint to an artifact that was verified and scored: calibrate, export, verify, evaluate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from swin_quant.arguments import checked
from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import engine_named, target_named
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import UsageError, called_in_python
from swin_quant.base.files import ensure_writable_dir
from swin_quant.data.picture_set import PictureSet, Source, asked_for
from swin_quant.data.sources import TRAIN, place_has
from swin_quant.exported import Exported, model_of
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import AUTO
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import load_policy
from swin_quant.report.verdict import DeployVerdict
from swin_quant.verbs.budget import Budget
from swin_quant.verbs.calibrate import calibrate
from swin_quant.verbs.evaluate import Evaluation, evaluate
from swin_quant.verbs.export import export
from swin_quant.verbs.export_target import ExportTarget, check_policy, engine_for, float_type_options
from swin_quant.verbs.export_tuned import check_tunable
from swin_quant.verbs.quantization import Quantization
from swin_quant.verbs.quantize_steps import finish, refuse_contradictions, refuse_useless, steps, verdict_on
from swin_quant.verbs.search import search
from swin_quant.verbs.verify import verify

EXAMPLES = """swin-quant quantize swin_tiny_patch4_window7_224.pth --data-path imagenet --for openvino --output out
swin-quant quantize my.pth --data-path imagenet --for openvino --policy auto --max-drop 0.1 --output out"""


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

    def show(self) -> None:
        """Print the table and the verdict."""
        self.evaluation.show()

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        return self.evaluation.to_json()


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

    A step whose result lies in the output folder is not done again, so a run that was cut off goes on. A model in
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
        passes: what recovers accuracy afterwards: a recipe (fast, best, ...) or its file; none (default: channels that
            stand out are evened out)
        budget: Of a search; without a limit of the loss, 0.1 points of top-1.
        int4_weights: ONNX: store weights of at most 4 bits as INT4 (policies w4a16, w4a8)
        tune: openvino: try policies and operators here, keep the fastest
        float_type: type of float layers (default float32; GPUs float16)
        threads: threads of the engine (default: its own choice)
        half: half-precision baseline (default: the device's)
        dry_run: print the steps, as commands, and do nothing
        config: For a checkpoint whose model no run card or shape tells.

    Returns:
        The artifact with its results and the verdict.

    Raises:
        SwinQuantError: The artifact does not compute what the model computes, or the budget cannot be met.
        UsageError: Options that contradict each other.
    """
    one_process("quantize")
    choice = policy if isinstance(policy, PolicyChoice) else None
    name = AUTO if policy == AUTO or (choice and choice.policy == (AUTO,)) else None
    if budget != Budget() and not name:
        raise UsageError(f"a budget needs ‹policy› {AUTO}, which searches for a policy that keeps it")
    if tune and ((choice != PolicyChoice() if choice else policy) or float_type or int4_weights):
        raise UsageError(
            "‹tune› chooses the policy, and times files in the engine's fastest types: leave ‹policy› and what changes "
            "one, ‹float_type› and ‹int4_weights› out"
        )
    asked_pictures = asked_for(PictureSet() if pictures is None else pictures)
    source = asked_pictures.settled() if isinstance(asked_pictures, PictureSet) else asked_pictures
    target = target_named(backend)
    with called_in_python(calibrator="method"):
        kind = "percentile" if method is None and percentile is not None else method
        found_by = Method(kind, exact=exact) if percentile is None else Method(kind, percentile, exact)
    if isinstance(model, str | Path):
        model = ModelFile(str(model), cfg=str(config) if config else None)
    plain = isinstance(policy, str | PolicyChoice | None) and isinstance(passes, str | None) and scored_on is None
    if isinstance(model, ModelFile) and isinstance(source, PictureSet) and plain:
        choice = choice or PolicyChoice((policy,) if isinstance(policy, str) else ())
        _check_choice(choice)
        model = _turning(model, pictures)
        cfg = model.config()
        model.need_checkpoint().forget()
        place = Path("output") / cfg.MODEL.NAME if folder is None else Path(folder)
        assert isinstance(asked_pictures, PictureSet), "`source` is one"
        settled = asked_pictures.settled(cfg)
        asked = replace(asked_pictures, path=settled.path, zip_mode=settled.zip_mode or None)
        if not settled.path or (not place_has(settled.path, TRAIN) and not Path(settled.path).exists()):
            train = settled.with_default_split(TRAIN)
            train.open()  # says what is missing, before the choice of a policy compiles operators
        wanted = (choice, found_by, passes if isinstance(passes, str) else None, budget, int4_weights, tune)
        job = Quantization(model, cfg, place, target, settled, asked, *wanted, float_type, threads, half)
        return _quantize_file(job, dry_run)
    if dry_run:
        raise UsageError("‹dry_run› prints commands, which name files: give a checkpoint, a place and named options")
    if isinstance(model, ModelFile):
        subject = _turning(model, pictures).load()
    elif config:
        raise UsageError("‹config› is for a checkpoint: a model in memory has its own")
    else:
        subject = model_of(model)
    timing = {"threads": threads, "float_type": float_type}
    told: dict[str, Any] = {"int4_weights": int4_weights, "tune": tune}
    engine = engine_for(target)
    told |= float_type_options(target, engine_named(engine) if engine else None, float_type)
    return _quantize_in_memory(
        subject, source, target, folder or "output", policy, scored_on,
        {"method": method, "percentile": percentile, "exact": exact, "passes": passes}, told, budget, timing, half,
    )  # fmt: skip


def _turning(file: ModelFile, pictures: Any) -> ModelFile:
    """A checkpoint whose preprocessing turns pictures as a set says, if it says so."""
    if not isinstance(pictures, PictureSet) or pictures.upright is None:
        return file
    return replace(file, opts=(*file.opts, "DATA.UPRIGHT", str(pictures.upright)))


def _check_choice(choice: PolicyChoice) -> None:
    if len(choice.policy) > 1:
        raise UsageError(f"--policy {' '.join(choice.policy)}: give one")
    if choice.policy != (AUTO,):
        return
    if choice.saturation_safe:
        raise UsageError("--saturation-safe: a search measures policies as they are: leave it out")
    if changes := [one.name for one in fields(choice) if one.name != "policy" and getattr(choice, one.name)]:
        raise UsageError(
            f"--policy {AUTO}: ‹{changes[0]}› is for a policy with a name: calibrate, then `search --policy NAME` "
            "with it"
        )


def _quantize_file(job: Quantization, dry_run: bool) -> Quantized | None:
    """Print the steps of a job, or do those that are not done."""
    refuse_contradictions(job)
    unscored = f"{job.pictures.path} has no val split"
    if dry_run:
        for step in steps(job):
            print(step.command + ("    # done" if step.is_done else ""))
        if job.engine and not job.has_val:
            print(f"# not scored: {unscored}")
        return None
    artifact = finish(job)
    verdict = verdict_on(artifact, job.target, job.calibrated, job.pictures.path, unscored)
    return Quantized(Exported(artifact), Evaluation(tuple(artifact.card.measured()), artifact.card, verdict=verdict))


def _quantize_in_memory(
    model: Model,
    source: PictureSet | Iterable[Any],
    target: Backend,
    folder: str | Path,
    policy: Policies,
    scored_on: Source | None,
    ranges: dict[str, Any],
    exporting: dict[str, Any],
    budget: Budget,
    timing: dict[str, Any],
    half: Any,
) -> Quantized:
    place = source if isinstance(source, PictureSet) else None
    if place and scored_on is None and place_has(place.path, "val", bool(place.zip_mode)):
        scored_on = replace(place, split=None, count=None, seed=None)
    target.exporting.check_packages()
    ensure_writable_dir(folder)
    best = target.exporting.policies_for(model.card.config)[0]
    asked = None if policy == AUTO else one_policy(policy)
    if exporting["tune"]:
        wanted = ExportTarget.of(target.name, "int8", {"int4_weights": exporting["int4_weights"]})
        check_tunable(wanted, asked, replace(model.card, policy=load_policy(best).to_dict()))
    named = asked or load_policy(best)
    check_policy(target, named)
    calibrate(model, source, named, **ranges, folder=folder)
    if policy == AUTO:
        searched_on = replace(place, count=None) if place else source
        found = search(model, searched_on, target.name, folder, budget=budget, **timing)
        refuse_useless(found, target, model.checkpoint)
    exported = export(model, target.name, folder, **exporting)
    scored = Evaluation((), exported.card)
    if engine := engine_for(target):
        verify(exported, source if scored_on is None else scored_on, engine, **timing).check()
        if scored_on is not None:
            scored = evaluate(exported, scored_on, engine=engine, half=half, **timing)
    data = place.path if place else "DIR"
    unscored = f"{data} has no val split" if place else "no labelled pictures were given"
    verdict = scored.verdict or verdict_on(exported.artifact, target, model.checkpoint, data, unscored)
    return Quantized(exported, replace(scored, verdict=verdict))
