"""Train a float model, from scratch or from weights: writes <NAME>.pth, its run card and logs, then scores it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare
from swin_quant.cli.output import show_cards
from swin_quant.config.load import portable_config
from swin_quant.train.recipe import Recipe, load_recipe, recipe_of_config
from swin_quant.train.record import FORMATS

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import Checkpoint
    from swin_quant.train.run import Request, Trained

EXAMPLES = """examples:
  swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out
  swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out --continue
  torchrun --nproc_per_node 8 -m swin_quant train --cfg swin_tiny_patch4_window7_224 --data-path imagenet"""
_CONSTANT, _OF_CONFIG = "constant", "config"


@dataclass(frozen=True)
class TrainingOptions:
    """How a model is trained: a recipe, and keys of it that have a flag of their own."""

    TITLE = "training"
    recipe: Annotated[str | None, Flag("how to train: a shipped recipe or a YAML file", "NAME|FILE")] = None
    set: Annotated[tuple[str, ...], Flag("set keys of the recipe", "KEY=VALUE")] = ()
    epochs: Annotated[int | None, Flag("epochs", "N")] = None
    lr: Annotated[float | None, Rare("optimizer.lr", "LR")] = None
    schedule: Annotated[
        Literal["cosine", "constant"] | None,
        Rare("schedule of the learning rate; constant: without warm-up, as FasterTransformer's"),
    ] = None
    drop_path: Annotated[str | None, Rare("augment.drop_path; config: MODEL.DROP_PATH_RATE", "RATE|config")] = None
    freeze_stages: Annotated[
        int | None, Rare("the first N stages and what comes before them stay as they are", "N")
    ] = None
    accumulation_steps: Annotated[int | None, Rare("batches a step of the optimizer", "N")] = None
    use_checkpoint: Annotated[bool, Rare("activation checkpointing")] = False
    compile: Annotated[bool, Rare("torch.compile: faster after a slow start")] = False
    amp_opt_level: Annotated[Literal["O0", "O1", "O2", "O3"] | None, Rare("precision of training")] = None
    fsdp: Annotated[bool, Rare("shard weights and optimizer over ranks (FSDP2)")] = False
    offload: Annotated[bool, Rare("with --fsdp: keep them on the CPU")] = False
    go_on: Annotated[bool, Flag("go on with the run of the output folder", name="--continue")] = False
    overwrite: Annotated[bool, Rare("replace the run that the output folder holds")] = False
    tensorboard: Annotated[bool, Rare("log to TensorBoard too (extra `logs`)")] = False
    plot: Annotated[str | None, Rare("form of the final plot (default png, where matplotlib is)", choices=FORMATS)] = (
        None
    )

    def change(self, recipe: Recipe, batch: int | None, **more: Any) -> Recipe:
        """`recipe` with --set, then with the keys that have a flag of their own, and with `more` keys."""
        pairs = [pair.partition("=") for pair in self.set]
        if bad := [key for key, sign, _ in pairs if not sign]:
            raise UsageError(f"--set takes KEY=VALUE, but got {bad[0]}")
        keys = {
            "epochs": self.epochs,
            "batch_size": batch,
            "accumulation_steps": self.accumulation_steps,
            "optimizer.lr": self.lr,
            "precision": self.amp_opt_level,
            "memory.checkpointing": self.use_checkpoint or None,
            "freeze_stages": self.freeze_stages,
            "compile": self.compile or None,
            "memory.fsdp": self.fsdp or None,
            "memory.offload": self.offload or None,
            "schedule.name": self.schedule,
            "schedule.warmup_epochs": 0 if self.schedule == _CONSTANT else None,
            **more,
        }
        flags = {key: value for key, value in keys.items() if value is not None}
        if self.drop_path:
            flags["augment.drop_path"] = None if self.drop_path == _OF_CONFIG else self.drop_path
        return recipe.having({key: value for key, _, value in pairs}, "--set").having(flags, "command line")

    def request(
        self, folder: Path, start: Checkpoint | None, data: shared.LoadingOptions, replace_head: bool
    ) -> Request:
        """The run that is asked for, beside config and recipe. UsageError for a plot that nothing here can draw."""
        from swin_quant.train.run import Request

        if self.plot:
            library("matplotlib", "logs")
        return Request(
            folder=folder,
            start=start,
            resume=self.go_on,
            overwrite=self.overwrite,
            tensorboard=self.tensorboard,
            plot=self.plot,
            replace_head=replace_head,
            max_unreadable=data.max_unreadable,
        )


@dataclass(frozen=True)
class TrainOptions:
    """The model to train, its pictures, and the training."""

    checkpoint: Annotated[
        str | None, Flag("weights to start from (default: from scratch)", "CHECKPOINT", or_flag=True)
    ] = None
    model: shared.ModelOptions = shared.ModelOptions()
    replace_head: shared.ReplaceHead = False
    data: shared.ScoringOptions = shared.ScoringOptions()
    training: TrainingOptions = TrainingOptions()
    no_eval: shared.NoEval = False
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None


def train_float(cfg: CfgNode, recipe: Recipe, request: Request, world: World) -> Trained:
    """Train `cfg`'s model from scratch, or from the weights of `request.start`; writes <NAME>.pth and its run card."""
    import torch

    from swin_quant.checkpoint import load_float, save_float
    from swin_quant.checkpoint.class_names import names_of
    from swin_quant.checkpoint.opened import open_checkpoint
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.models import build_model
    from swin_quant.train.outdir import only_writer
    from swin_quant.train.run import Trained, refuse_to_replace, run_training, training_config, with_batch_size

    with only_writer(request.folder, world):
        recipe = with_batch_size(recipe, cfg)
        torch.manual_seed(cfg.SEED)
        model = build_model(training_config(cfg, recipe))
        start = open_checkpoint(request.start) if request.start else None
        source = load_float(model, start, replace_head=request.replace_head).record() if start else None
        path = request.folder / f"{cfg.MODEL.NAME}.pth"
        refuse_to_replace(path, request)
        named = names_of(cfg, start, request.replace_head)
        if start:
            start.forget()
        model, position, record, named = run_training(model, cfg, recipe, request, world, named)
        preprocess = Preprocess.from_config(cfg).to_dict()
        card = RunCard(cfg.MODEL.NAME, portable_config(cfg), preprocess, source, class_names=named)
        if world.is_main:
            save_float(model, path)
            card = replace(card, checkpoint={"file": path.name, "sha256": sha256_of(path)}, training=record)
            card.write(path.with_suffix(".json"))
            log.info("checkpoint: %s", path)
        return Trained(model, path, card, position)


def run(options: TrainOptions, world: World) -> None:
    from swin_quant.model import Model
    from swin_quant.train.outdir import only_writer
    from swin_quant.verbs.evaluate import score_model, scored_on

    checkpoint, data, training = shared.opened(options.checkpoint), options.data, options.training
    cfg = shared.config_of(checkpoint, options.model, data, options.run, OUTPUT=options.output)
    recipe = training.change(load_recipe(training.recipe) if training.recipe else recipe_of_config(cfg), data.batch)
    folder = shared.output_dir(options.output, cfg)
    with only_writer(folder, world):  # until the last result is in the run card
        trained = train_float(cfg, recipe, training.request(folder, checkpoint, data, options.replace_head), world)
        if options.no_eval or trained.position.best_epoch is None:
            return
        model = Model(trained.model, card=trained.card)
        score_model(model, scored_on(cfg, model, max_unreadable=data.max_unreadable), (), world, data.half)
        if world.is_main:
            model.card.write(trained.checkpoint.with_suffix(".json"))
            show_cards([model.card])
