"""Training runs start to end: a config, a recipe and pictures in; a checkpoint, its run card and logs out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from yacs.config import CfgNode

from swin_quant.checkpoint import load_float, save_float
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.distributed import World
from swin_quant.errors import UsageError
from swin_quant.files import ensure_writable_dir, sha256_of
from swin_quant.models import build_model
from swin_quant.models.layers import Swin
from swin_quant.progress import log
from swin_quant.ptq import has_split, portable_config, save_with_card
from swin_quant.quant.policy import Policy, apply_policy, enabled_nodes, quantize
from swin_quant.runcard import RunCard, SourceRecord, versions
from swin_quant.scoring import load_for_scoring, open_labelled
from swin_quant.train.amax import RangeKeeper
from swin_quant.train.batches import TrainingBatches, ValidationBatches
from swin_quant.train.distill import check_teacher
from swin_quant.train.loop import Job, fit
from swin_quant.train.outdir import open_folder, settings_of
from swin_quant.train.recipe import Recipe
from swin_quant.train.state import Position


@dataclass(frozen=True)
class Request:
    """What a run is asked for besides config and recipe; paths as given, `folder` for everything that is written."""

    folder: Path
    start: str | None = None
    teacher: str | None = None
    teacher_cfg: CfgNode | None = None
    resume: bool = False
    overwrite: bool = False
    tensorboard: bool = False
    replace_head: bool = False
    max_unreadable: float = 0.01


@dataclass(frozen=True)
class Trained:
    """A trained model in evaluation mode, where it was saved, and its card."""

    model: Swin
    checkpoint: Path
    card: RunCard
    position: Position


def train_float(cfg: CfgNode, recipe: Recipe, request: Request, world: World = World()) -> Trained:  # noqa: B008
    """Train `cfg`'s model from scratch, or from the weights of `request.start`; writes <NAME>.pth and its run card."""
    recipe = with_batch_size(recipe, cfg)
    torch.manual_seed(cfg.SEED)
    model = build_model(training_config(cfg, recipe))
    source = load_float(model, request.start, replace_head=request.replace_head).record() if request.start else None
    path = request.folder / f"{cfg.MODEL.NAME}.pth"
    position, record = run(model, cfg, recipe, request, world)
    card = RunCard(cfg.MODEL.NAME, portable_config(cfg), Preprocess.from_config(cfg).to_dict(), source)
    if world.is_main:
        save_float(model, path)
        card = replace(card, checkpoint={"file": path.name, "sha256": sha256_of(path)}, training=record)
        card.write(path.with_suffix(".json"))
        log.info("checkpoint: %s", path)
    return Trained(model, path, card, position)


def finetune(
    cfg: CfgNode,
    recipe: Recipe,
    request: Request,
    policies: Sequence[Policy],
    world: World = World(),  # noqa: B008
) -> Trained:
    """QAT of the calibrated checkpoint `request.start` under a policy (else its run card's); writes <NAME>_qat.pth.

    The result is calibrated as well, in the same formats, and no weight of it lies outside its range.
    """
    recipe = with_batch_size(recipe, cfg)
    if not request.start:
        raise UsageError("no checkpoint: give the calibrated one as --pretrained FILE (with --resume auto, too)")
    subject = load_for_scoring(training_config(cfg, recipe), request.start, policies, world)
    if len(subject.policies) != 1:
        raise UsageError(f"{request.start}: QAT needs one policy: give --int8-mode 1, 2 or a --policy")
    model, policy = subject.model, subject.policies[0]
    apply_policy(model, policy)
    if not enabled_nodes(model):
        raise UsageError(f"policy {policy.name} quantizes nothing: choose another, or `swin-quant train` for float")
    quantize(model)
    path = request.folder / f"{cfg.MODEL.NAME}_qat.pth"
    position, record = run(model, cfg, recipe, request, world, policy)
    card = replace(subject.card, policy=policy.to_dict(), training=record, results=[], versions=versions())
    if world.is_main:
        card = save_with_card(model, path, card)
    return Trained(model, path, card, position)


def run(
    model: Swin, cfg: CfgNode, recipe: Recipe, request: Request, world: World, policy: Policy | None = None
) -> tuple[Position, dict[str, Any]]:
    """Train `model` in place by `recipe` on the config's pictures; returns how far it got, and the card's `training`.

    Everything that can be refused is refused before the first step. `policy` is given for QAT: the nodes are on then.
    """
    start = {"file": Path(request.start).name, "sha256": sha256_of(request.start)} if request.start else None
    settings = settings_of(
        recipe, world.size, cfg.SEED, model=cfg.MODEL.NAME, start=start, policy=policy and policy.to_dict()
    )
    snapshot = open_folder(request.folder, settings, request.resume, request.overwrite, recipe.keep, world.is_main)
    teacher, teacher_source = load_teacher(cfg, recipe, request, model, world)
    preprocess = Preprocess.from_config(cfg)
    pictures = open_labelled(cfg, "train", world)
    reading = {"world": world, "workers": cfg.DATA.NUM_WORKERS, "max_unreadable": request.max_unreadable}
    batches = TrainingBatches(pictures, recipe, preprocess, cfg.MODEL.NUM_CLASSES, cfg.SEED, **reading)
    validation = None
    if has_split(cfg, "val"):
        held_out = open_labelled(cfg, "val", world)
        validation = ValidationBatches(held_out, preprocess, cfg.DATA.BATCH_SIZE, **reading)
    else:
        log.warning("%s has no val split: the last weights are kept, not the best", cfg.DATA.DATA_PATH)
    if world.is_main:
        ensure_writable_dir(request.folder)
    for stage in model.layers:
        stage.checkpointing = recipe.memory.checkpointing
    model.to(world.device)
    job = Job(
        model, recipe, batches, validation, cfg.SEED, world, teacher, request.folder, snapshot, settings,
        request.tensorboard,
    )  # fmt: skip
    if policy:
        keeper = RangeKeeper(model, recipe.amax, recipe.epochs, partial(batches.sample, recipe.amax.batches))
        job.after_step, job.after_epoch = keeper.after_step, keeper.after_epoch
    log.info("%d epochs of %d steps of %d pictures", recipe.epochs, batches.steps, batches.step_pictures)
    position = fit(job)
    if policy:
        keeper.settle()
    record = training_record(recipe, cfg, batches, pictures, position, teacher_source, world)
    return position, record | {"start": start}


def training_record(
    recipe: Recipe,
    cfg: CfgNode,
    batches: TrainingBatches,
    pictures: Pictures,
    position: Position,
    teacher: SourceRecord | None,
    world: World,
) -> dict[str, Any]:
    """The section `training` of a run card."""
    return {
        "recipe": recipe.to_dict(),
        "seed": cfg.SEED,
        "world": world.size,
        "device": world.device.type,
        "step_pictures": batches.step_pictures,
        "steps": position.total,
        "pictures": len(pictures),
        "pictures_sha256": digest(pictures.names),
        "teacher": teacher,
        "best_epoch": position.best_epoch,
        "epochs": position.epochs,
    }


def load_teacher(
    cfg: CfgNode, recipe: Recipe, request: Request, student: Swin, world: World
) -> tuple[Swin | None, SourceRecord | None]:
    """The float teacher that the recipe distils from, if it does: any model of the same classes."""
    wanted = recipe.distill.weight > 0 or recipe.distill.features > 0
    if not wanted:
        if request.teacher:
            raise UsageError("--teacher needs a recipe that distils: set distill.weight, or give --distill")
        return None, None
    if not request.teacher:
        raise UsageError(f"recipe {recipe.name} distils: give the float checkpoint of the teacher as --teacher")
    teacher = build_model(request.teacher_cfg or cfg)
    check_teacher(student, teacher, recipe.distill)
    source = load_float(teacher, request.teacher)
    return teacher.to(world.device).eval().requires_grad_(False), source.record()


def with_batch_size(recipe: Recipe, cfg: CfgNode) -> Recipe:
    """The recipe with the config's batch size where it has none of its own."""
    return recipe if recipe.batch_size else recipe.having({"batch_size": cfg.DATA.BATCH_SIZE}, "DATA.BATCH_SIZE")


def training_config(cfg: CfgNode, recipe: Recipe) -> CfgNode:
    """The config with the recipe's drop path rate."""
    if recipe.augment.drop_path is None:
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DROP_PATH_RATE = recipe.augment.drop_path
    cfg.freeze()
    return cfg
