"""QAT: fine-tune a calibrated checkpoint with its nodes on: writes <NAME>_qat.pth, its run card and logs; scores it."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from yacs.config import CfgNode

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import World, this_world, world_on
from swin_quant.base.errors import UsageError, called_in_python
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards import lineage
from swin_quant.cards.records import RangesRecord
from swin_quant.config.outputs import LOGITS
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.sources import has_split
from swin_quant.exported import open_model
from swin_quant.loading import ModelFile, load_for_scoring, open_baseline
from swin_quant.model import Model, save_calibrated
from swin_quant.policies import Policies, PolicyChoice, one_policy, tell_bits
from swin_quant.quant.policy import Policy, enabled_nodes, quantize
from swin_quant.report.verdict import DeployVerdict, training_verdict
from swin_quant.score.baseline import find_baseline
from swin_quant.train.amax import settle_granularity
from swin_quant.train.outdir import only_writer
from swin_quant.train.recipe import Recipe, load_recipe
from swin_quant.train.run import (
    NOT_FOR_TRAINING,
    Qat,
    Request,
    Training,
    folder_for,
    place_to_train_on,
    refuse_to_replace,
    run_training,
    snapshots_named,
    training_config,
    with_batch_size,
    with_precision,
)
from swin_quant.verbs.evaluation import BATCH, Evaluation, score_model
from swin_quant.verbs.export import ensure_saved
from swin_quant.verbs.train import TrainedFile

EXAMPLES = """swin-quant finetune out/my_calib.pth --data-path imagenet --recipe qat_tiny --distill
swin-quant finetune out/my_calib.pth --data-path data --recipe micro_w4a4 --policy qdq --wprec 4 --aprec 4
torchrun --nproc_per_node 4 qat_finetune.py out/my_calib.pth --data-path imagenet --continue"""
DEFAULT_RECIPE = "qat_tiny"


@dataclass(frozen=True)
class Finetuned(TrainedFile):
    """The checkpoint that QAT wrote, and its results; printed, the accuracy-delta table and the verdict."""

    @property
    def verdict(self) -> DeployVerdict | None:
        """Whether to deploy QAT or to keep PTQ; None where no val was scored."""
        return self.evaluation.verdict


@checked
def finetune(
    model: Annotated[Model | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[PictureSet | str | Path, Fields(PictureSet, "pictures", without=NOT_FOR_TRAINING)],
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    recipe: Annotated[str | Training, Fields(Training, "training")] = DEFAULT_RECIPE,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    epochs: Annotated[int | None, Parameter(group="training")] = None,
    resume: Annotated[bool, Parameter(name="--continue", group="training")] = False,
    overwrite: Annotated[bool, Parameter(group="training")] = False,
    distill: Annotated[bool, Parameter(group="QAT")] = False,
    teacher: Annotated[str | Path | None, Parameter(group="QAT")] = None,
    amax: Annotated[Literal["frozen", "learned", "reestimated"] | None, Parameter(group="QAT")] = None,
    qat: Annotated[Qat, Fields(Qat, "QAT")] = Qat(),
    half: Literal["auto", "none", "float16", "bfloat16"] = "auto",
    original: Annotated[str | Path | None, Parameter(name="--float")] = None,
    no_eval: bool = False,
    score_pictures: int | None = None,
    changes: Annotated[Mapping[str, Any] | None, Parameter(parse=False)] = None,
    batch_size: Annotated[int | None, Parameter(parse=False)] = None,
    config: Annotated[str | Path | None, Parameter(parse=False)] = None,
    device: Annotated[str, Parameter(parse=False)] = "cpu",
) -> Finetuned:
    """Train a calibrated model with quantization (QAT): writes <NAME>_qat.pth, and scores it on val.

    The result is a calibrated checkpoint, under the policy that it was trained under. A model that gives maps or an
    embedding needs no labels: it learns to give the float model's outputs. Processes of a launcher share each step.

    Args:
        model: A calibrated model, which is saved in the folder first if it is in no file, or its checkpoint.
        pictures: A place with train and val.
        folder: folder of the results (default: output/<NAME>)
        recipe: A shipped recipe or a YAML file (default: qat_tiny), or also changes of it.
        policy: Default: the model's.
        epochs: number of epochs (default: the recipe's)
        resume: go on with the run in the output folder
        overwrite: replace the run in the output folder
        distill: learn from a teacher, too, even if the recipe does not
        teacher: float checkpoint to learn from (default: the original)
        amax: how ranges are trained (default: the recipe's way)
        qat: How a teacher is learned from.
        half: type in which the float model is scored, too; auto: the device's
        original: float checkpoint to compare with (default: searched for)
        no_eval: do not score the result
        score_pictures: how many pictures of val score, a seeded sample (default: all)
        changes: Keys of the recipe, {"optimizer.lr": 1e-4}.
        batch_size: Pictures at a time, a rank.
        config: YAML, or a shipped name (default: the checkpoint says).
        device: auto, cpu or cuda, unless `model` is a ModelFile.

    Returns:
        The file, its results, and the verdict.

    Raises:
        UsageError: A model that is not calibrated, or a wrapped module: train it in your own loop.
    """
    if score_pictures is not None and score_pictures < 1:
        raise UsageError(f"‹score_pictures› {score_pictures}: must be at least 1")
    place = place_to_train_on(pictures, batch_size)
    world = this_world() if isinstance(model, ModelFile) else world_on(device)
    training = recipe if isinstance(recipe, Training) else Training(recipe)
    with called_in_python(**{"continue": "resume", "output": "folder", "batch": "batch_size"}):
        if not isinstance(model, str | Path | ModelFile):
            model = open_model(model)
            if not model.card.config:
                raise UsageError(f"{model.name}: is a module of your own: train it in your own loop, its nodes on")
            model.need_calibrated()
            model = ensure_saved(model, ensure_writable_dir(folder_for(folder, model.config)))
        file = model if isinstance(model, ModelFile) else ModelFile(str(model), cfg=str(config) if config else None)
        cfg, chosen = file.config(place.config_keys()), one_policy(policy)
        keys = {"epochs": epochs, "batch_size": place.batch, "amax__mode": amax, **qat.keys()}
        wanted = load_recipe(training.recipe or DEFAULT_RECIPE).having(changes or {}, "changes")
        wanted = with_batch_size(training.change(wanted, **keys), cfg)
        wanted, note = with_precision(wanted, training, cfg, world, changes or ())
        if (distill or teacher) and not wanted.distill.weight:
            wanted = wanted.having({"distill.weight": 1.0}, "--distill")
        files = {"teacher": teacher and str(teacher), "original": original and str(original), "note": note}
        how: dict[str, Any] = {**files, "teacher_cfg": qat.config(teacher), "resume": resume, "overwrite": overwrite}
        request = training.request(folder_for(folder, cfg), file.opened, place, replace_head=file.replace_head, **how)
        saved = snapshots_named(request.folder) if resume else nullcontext()
        with only_writer(request.folder, world), saved:  # until the last result is in the run card
            trained, path, used, is_chosen = _trained(cfg, wanted, request, chosen, world)
            has_logits = cfg.MODEL.OUTPUT_KIND == LOGITS
            if no_eval or (not is_chosen if has_logits else world.size > 1 or not has_split(cfg, "val")):
                return Finetuned(Evaluation((), trained.card), path)
            baseline = find_baseline(trained.card, [path.resolve().parent], cfg, [used], world, request.original)
            how = {"max_unreadable": request.max_unreadable, "batch": BATCH[world.device.type]}
            val = PictureSet.from_config(cfg, "val", **how | ({"count": score_pictures} if score_pictures else {}))
            scored = score_model(trained, val, [used], world, half, baseline)
            if has_logits and world.is_main:
                trained.card.write(path.with_suffix(".json"))
        return Finetuned(replace(scored, verdict=training_verdict(trained.card, path)) if has_logits else scored, path)


def _trained(
    cfg: CfgNode, recipe: Recipe, request: Request, chosen: Policy | None, world: World
) -> tuple[Model, Path, Policy, bool]:
    """The trained model, which is in <NAME>_qat.pth, the policy, and whether val chose the epoch."""
    if cfg.MODEL.OUTPUT_KIND != LOGITS:  # without labels, a model learns from the float model's outputs
        recipe = recipe.having({"distill.weight": 1.0, "augment.mixup": 0.0, "augment.cutmix": 0.0}, "a backbone")
    if not request.start:
        raise UsageError("no checkpoint: give the calibrated one (with ‹continue›, too)")
    refuse_to_replace(path := request.folder / f"{cfg.MODEL.NAME}_qat.pth", request, world)
    if not request.resume:
        lineage.refuse_to_replace(path)
    found_anew = recipe.amax.initial == "reestimated" and recipe.amax.weights and recipe.amax.activations
    policies = [chosen] if chosen else []
    start, found = load_for_scoring(training_config(cfg, recipe), request.start, policies, world, any_bits=found_anew)
    if len(found) != 1:
        raise UsageError(f"{request.start}: is not calibrated: run `swin-quant calibrate` first, QAT starts from there")
    if request.original:
        open_baseline(start, found, world, request.original, cfg)  # refuses another file, and names it without a card
    module, policy = start.network, found[0]
    if not enabled_nodes(module):
        raise UsageError(f"policy {policy.name} quantizes nothing: choose another, or `swin-quant train` for float")
    quantize(module)
    tell_bits([policy])
    # Snapshots are compared with the model, and have the ranges that training gives it.
    settle_granularity(module, enabled_nodes(module))
    if not request.teacher and recipe.distill.weight:  # the float model that was calibrated, if it is found
        origin = lineage.find_original(start.card, [Path(request.start).resolve().parent], request.original)
        if teacher := origin or (None if start.card.has_own_weights else Path(request.start)):
            log.info("teacher: %s, the float model that was calibrated (‹teacher› names another)", teacher)
            request = replace(request, teacher=str(teacher))
    module, position, record, names = run_training(module, cfg, recipe, request, world, start.class_names, policy)
    if start.card.training and "ranges" in start.card.training:  # one learned before was not calibrated
        now, before = record["ranges"], start.card.training["ranges"]
        record["ranges"] = RangesRecord(
            weights=now["weights"] or before["weights"], activations=now["activations"] or before["activations"]
        )
    card = start.card.with_new_weights(policy=policy.to_dict(), training=record, class_names=names)
    if world.is_main:
        card = save_calibrated(module, path, card, by_channel=True)
    return Model(module, card=card), path, policy, position.best_epoch is not None
