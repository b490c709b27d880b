"""Run a training, float or QAT: its arguments, the checks before the first step, the loop, the record for the card."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from yacs.config import CfgNode

from swin_quant.base.arguments import Parameter
from swin_quant.base.distributed import World, from_main
from swin_quant.base.errors import SwinQuantError, UsageError, is_offered, listed
from swin_quant.base.files import ensure_writable_dir, resolve_path, shipped_files
from swin_quant.base.progress import log
from swin_quant.base.schema import plain
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import CheckpointRecord, TrainingRecord
from swin_quant.checkpoint.identify import config_given
from swin_quant.checkpoint.opened import Checkpoint, open_checkpoint
from swin_quant.config.outputs import count_classes
from swin_quant.data.class_names import stated
from swin_quant.data.loader import LoaderKilled
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import has_split
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import Policy, policy_with_bits
from swin_quant.score.engine import get_precision
from swin_quant.score.scoring import open_labelled
from swin_quant.train.amax import RangeKeeper
from swin_quant.train.batches import TrainingBatches, ValidationBatches
from swin_quant.train.distill import load_teacher
from swin_quant.train.loop import Job, fit
from swin_quant.train.optim import freeze_stages
from swin_quant.train.outdir import check_free, list_settings, open_folder
from swin_quant.train.parallel import check_compiler, check_parallel, is_emulated, without_values
from swin_quant.train.recipe import Recipe, load_recipe
from swin_quant.train.snapshot import Position, Snapshots, check_snapshot

_MANY_ON_CPU, _SMALL = 16, 64  # pictures of a step; pixels of a side


@dataclass(frozen=True)
class Request:
    """The settings of a run besides config and recipe. `folder` is for all output.

    `original`: the float checkpoint to compare QAT with; None looks for it. `note`: is said when training begins.
    """

    folder: Path
    start: Checkpoint | None = None
    teacher: str | None = None
    teacher_cfg: CfgNode | None = None
    resume: bool = False
    overwrite: bool = False
    replace_head: bool = False
    max_unreadable: float = 0.01
    original: str | None = None
    note: str | None = None


def refuse_to_replace(path: Path, request: Request, world: World) -> None:
    """UsageError if the result at `path`, or its card, would replace a file that the run starts from, or a run."""
    if world.is_main:
        check_free(request.folder, request.resume, request.overwrite)
    for file in (request.start, request.teacher, request.original):
        pairs = [(path, Path(file)), (card_path(path), card_path(file))] if file else []
        if any(one.exists() and other.exists() and one.samefile(other) for one, other in pairs):
            raise UsageError(f"‹output› {request.folder}: the result would be written over {file}: give another folder")


def run_training(
    model: Classifier,
    cfg: CfgNode,
    recipe: Recipe,
    request: Request,
    world: World,
    class_names: list[str],
    policy: Policy | None = None,
) -> tuple[Classifier, Position, TrainingRecord, list[str]]:
    """Train `model` by `recipe` on the config's pictures.

    Returns the model, the position reached, the card's `training`, and the class names: `class_names`, or the pictures'
    own if it is empty. Every refusal comes before the first step. `policy`: QAT's, whose nodes are on; None for float.
    """
    check_parallel(recipe, world)
    check_compiler(recipe, world.device)
    frozen = freeze_stages(model, recipe.freeze_stages)
    start: CheckpointRecord | None = None
    if request.start:
        start = {"file": Path(request.start).name, "sha256": open_checkpoint(request.start).sha256}
    teacher, teacher_source = load_teacher(
        request.teacher, request.teacher_cfg or cfg, recipe.distill, model, world.device
    )
    preprocess = Preprocess.from_config(cfg)
    if has_labels := bool(count_classes(cfg)):
        pictures = open_labelled(cfg, "train", world, class_names=class_names)
        class_names = class_names or stated(pictures.class_names, cfg.MODEL.NUM_CLASSES)
    else:
        pictures = PictureSet.from_config(cfg, "train").open(world=world)
    identity = {
        "model": cfg.MODEL.NAME,
        "start": start,
        "policy": policy and policy.to_dict(),
        "teacher_sha256": teacher_source and teacher_source["sha256"],
        "pictures_sha256": digest(pictures.names),
        **{f"preprocess.{key}": plain(value) for key, value in asdict(preprocess).items()},
    }
    settings = list_settings(recipe, world.size, cfg.SEED, **identity)
    snapshot = None
    if world.is_main:
        check = partial(check_snapshot, model=model)
        snapshot = open_folder(request.folder, settings, request.resume, request.overwrite, recipe.keep, check)
    snapshot = from_main(snapshot)
    if request.note:
        log.info(request.note)
    reading = world, cfg.DATA.NUM_WORKERS, request.max_unreadable
    batches = TrainingBatches(pictures, recipe, preprocess, cfg.MODEL.NUM_CLASSES, cfg.SEED, *reading)
    validation = None  # the batches that choose the best epoch
    if has_labels and has_split(cfg, "val"):
        held_out = open_labelled(cfg, "val", world, class_names=class_names)
        validation = ValidationBatches(held_out, preprocess, cfg.DATA.BATCH_SIZE, *reading)
    elif has_labels:
        log.warning("%s has no val split: the last weights are kept, not the best", cfg.DATA.DATA_PATH)
    model.to(world.device)
    able: list[Any] = [module for module in model.modules() if hasattr(module, "checkpointing")]
    if recipe.memory.checkpointing and not able:
        raise UsageError("‹use_checkpoint›: this architecture cannot compute its blocks again: leave it out")
    for module in able:
        module.checkpointing = recipe.memory.checkpointing
    job = Job(model, recipe, batches, validation, cfg.SEED, world, teacher, request.folder, snapshot, settings)
    keeper = None
    if policy:
        sample = partial(batches.sample, recipe.amax.batches)
        keeper = RangeKeeper(model, recipe.amax, recipe.epochs, sample, frozen)
        job.after_step, job.after_epoch = keeper.after_step, keeper.after_epoch
        bits = {"int8": "W8A8"}.get(get_precision(model), get_precision(model))
        log.info("training under policy %s (%s) by recipe %s", policy.name, bits, recipe.name)
        if recipe.bits and bits not in (recipe.bits, "mixed"):
            fitting = [path.stem for path in shipped_files("recipes") if load_recipe(path.stem).bits == bits]
            told = "recipe %s is made for %s, but policy %s has %s: give another ‹recipe› (%s), or %s"
            other = policy_with_bits(int(recipe.bits[1]), int(recipe.bits[3]))
            log.warning(told, recipe.name, recipe.bits, policy.name, bits, listed(fitting) or "of your own", other)
    trained, position = _fitted(job, request.folder)
    if keeper:
        keeper.settle(trained)
    if world.is_main:
        ensure_writable_dir(request.folder)  # the folder may have been moved away
    if start and request.start:
        start = {**start, "path": str(resolve_path(request.start))}
    record: TrainingRecord = {
        "recipe": recipe.to_dict(),
        "seed": cfg.SEED,
        "world": world.size,
        "device": world.device.type,
        "step_pictures": batches.step_pictures,
        "steps": position.total,
        "pictures": len(pictures),
        "pictures_sha256": digest(pictures.names),
        "start": start,
        "teacher": teacher_source,
        "best_epoch": position.best_epoch,
        "epochs": position.epochs,
    }
    if keeper:
        record["ranges"] = keeper.record()
    return trained, position, record, class_names


@contextmanager
def snapshots_named(folder: Path) -> Iterator[None]:
    """What interrupts a run that has snapshots in `folder` says how to go on."""
    try:
        yield
    except (KeyboardInterrupt, LoaderKilled) as stop:
        if not Snapshots(folder / "snapshots").newest_first():
            raise
        then = "the run is saved: go on with the same command and ‹continue›"
        then = then if is_offered("continue") else "the same command begins again"
        if isinstance(stop, LoaderKilled):
            raise SwinQuantError(f"{stop.args[0]}; {then}") from stop
        raise KeyboardInterrupt(then) from stop


def _fitted(job: Job, folder: Path) -> tuple[Classifier, Position]:
    """Run the loop: the trained model, whole on every rank, and the position reached."""
    batches, memory = job.batches, job.recipe.memory
    log.info("epochs: %d, each of %d steps of %d pictures", job.recipe.epochs, batches.steps, batches.step_pictures)
    batch, side = job.recipe.batch_size or 0, job.model.input_shape[-1]
    if job.world.device.type == "cpu" and batch > _MANY_ON_CPU and side > _SMALL:
        told = "%d pictures at a time on a CPU: a step may take minutes and gigabytes; ‹batch› 8 takes less of both"
        log.warning(told, batch)
    whole = without_values(job.model).eval() if memory.fsdp else job.model
    with snapshots_named(folder):
        position, weights = fit(job)
    if batches.limit.names:
        log.warning("training pictures that could not be read: %s", listed(batches.limit.names))
    if memory.fsdp:
        whole.load_state_dict(weights, assign=True)
        whole.to(job.world.device)
    return whole, position


def with_batch_size(recipe: Recipe, cfg: CfgNode) -> Recipe:
    """The recipe, with the config's batch size if it has none."""
    return recipe if recipe.batch_size else recipe.having({"batch_size": cfg.DATA.BATCH_SIZE}, "DATA.BATCH_SIZE")


def with_precision(
    recipe: Recipe, training: "Training", cfg: CfgNode, world: World, changes: Iterable[str] = ()
) -> tuple[Recipe, str | None]:
    """The recipe, in O0 if the device of `world` would emulate a precision that the user did not ask for, and a note.

    `changes`: keys of the recipe that the user changed, besides those of `training`.
    """
    keys = {*changes, *(pair.partition("=")[0] for pair in training.set)}
    is_asked = training.amp_opt_level or "precision" in keys or cfg.AMP_OPT_LEVEL == recipe.precision
    if is_asked or recipe.precision == "O0" or not is_emulated(recipe.half, world.device):
        return recipe, None
    note = "precision: O0, because this CPU has no bfloat16 arithmetic; ‹amp_opt_level› {} is slower here"
    return recipe.having({"precision": "O0"}, "this CPU"), note.format(recipe.precision)


def training_config(cfg: CfgNode, recipe: Recipe) -> CfgNode:
    """The config with the recipe's drop path rate."""
    if recipe.augment.drop_path is None:
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DROP_PATH_RATE = recipe.augment.drop_path
    cfg.freeze()
    return cfg


NOT_FOR_TRAINING = ("split", "count", "images")  # fields of its pictures


@dataclass(frozen=True)
class Training:
    """A recipe, and keys of it that have an argument of their own.

    Args:
        recipe: how to train: a YAML file, or qat_tiny, ..., qat_large, micro_w8a8, micro_w4a8, micro_w4a4, micro_float
        set: set keys of the recipe: KEY=VALUE ...
        lr: learning rate (optimizer.lr)
        schedule: of the learning rate; constant: without warm-up
        drop_path: drop path rate; config: the configuration's
        freeze_stages: do not train the first N stages and the embedding
        accumulation_steps: batches for each step of the optimizer
        use_checkpoint: activation checkpointing: less memory, more time
        compile: torch.compile: faster after a slow start
        amp_opt_level: precision of training
        fsdp: shard weights and optimizer over processes (FSDP2)
        offload: with `fsdp`: keep them on the CPU
    """

    recipe: str | None = None
    set: Annotated[tuple[str, ...], Parameter(accepts_keys=False)] = ()
    lr: float | None = None
    schedule: Literal["cosine", "constant"] | None = None
    drop_path: str | None = None
    freeze_stages: int | None = None
    accumulation_steps: int | None = None
    use_checkpoint: bool = False
    compile: bool = False
    amp_opt_level: Literal["O0", "O1", "O2", "O3"] | None = None
    fsdp: bool = False
    offload: bool = False

    def change(self, recipe: Recipe, **more: Any) -> Recipe:
        """The recipe with the keys of `set`, then with those of single arguments, and `more` keys that are not None.

        Args:
            recipe: What is changed.
            more: Values by key, with `__` for the dot.
        """
        pairs = [pair.partition("=") for pair in self.set]
        if bad := [key for key, sign, _ in pairs if not sign]:
            raise UsageError(f"‹set› takes KEY=VALUE, but got {bad[0]}")
        keys = {
            "accumulation_steps": self.accumulation_steps,
            "optimizer.lr": self.lr,
            "precision": self.amp_opt_level,
            "memory.checkpointing": self.use_checkpoint or None,
            "freeze_stages": self.freeze_stages,
            "compile": self.compile or None,
            "memory.fsdp": self.fsdp or None,
            "memory.offload": self.offload or None,
            "schedule.name": self.schedule,
            "schedule.warmup_epochs": 0 if self.schedule == "constant" else None,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        given = {key: value for key, value in keys.items() if value is not None}
        if self.drop_path:
            given["augment.drop_path"] = None if self.drop_path == "config" else self.drop_path
        return recipe.having({key: value for key, _, value in pairs}, "‹set›").having(given, "options")

    def request(self, folder: Path, start: Checkpoint | None, pictures: PictureSet, **more: Any) -> Request:
        """The run that is asked for, beside config and recipe."""
        share = 0.01 if pictures.max_unreadable is None else pictures.max_unreadable
        return Request(folder, start, max_unreadable=share, **more)


@dataclass(frozen=True)
class Qat:
    """How a teacher is learned from.

    Args:
        teacher_cfg: configuration of a teacher that is another model
        distill_weight: weight of the teacher's loss
        temperature: softens the logits in that loss
        distill_compat: ft: FasterTransformer's form of that loss
    """

    teacher_cfg: str | None = None
    distill_weight: float | None = None
    temperature: float | None = None
    distill_compat: Literal["none", "ft"] | None = None

    def keys(self) -> dict[str, Any]:
        """Keys of a recipe, as `Training.change` takes them."""
        loss = {"weight": self.distill_weight, "temperature": self.temperature, "compat": self.distill_compat}
        return {f"distill__{key}": value for key, value in loss.items()}

    def config(self, teacher: str | Path | None) -> CfgNode | None:
        """The config of a teacher, if it is another model."""
        return config_given(self.teacher_cfg, str(teacher) if teacher else None) if self.teacher_cfg else None


def place_to_train_on(pictures: Any, batch: int | None = None) -> PictureSet:
    """The place of train and val that a training was given, with the batch size if that was given.

    Raises:
        UsageError: It is a single split, a sample, or no place on disk.
    """
    place = PictureSet(str(pictures)) if isinstance(pictures, str | Path) else pictures
    if not isinstance(place, PictureSet) or place.split or place.count or place.images:
        raise UsageError("pictures: training reads train and val of a place on disk: give its path")
    return place if batch is None else replace(place, batch=batch)


def folder_for(folder: str | Path | None, cfg: CfgNode) -> Path:
    """The folder of a run's output: the one that was named, else output/<NAME>."""
    return Path(folder) if folder else Path("output") / cfg.MODEL.NAME
