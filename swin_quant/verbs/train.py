"""Train a float model, from scratch or from weights: writes <NAME>.pth, its run card and logs, then scores it."""

import html
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from swin_quant.base.arguments import Fields, Parameter
from swin_quant.base.distributed import this_world
from swin_quant.base.files import compute_sha256
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import load_float, save_float
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.config.load import portable_config
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import ModelFile, load
from swin_quant.model import Model
from swin_quant.models import build_model
from swin_quant.train.outdir import only_writer
from swin_quant.train.recipe import load_recipe, read_recipe
from swin_quant.train.run import (
    NOT_FOR_TRAINING,
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
from swin_quant.verbs.evaluation import Evaluated, Evaluation, score_model

EXAMPLES = """swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out
swin-quant train --cfg my.yaml --data-path cifar10 --recipe micro_float --output out --continue
torchrun --nproc_per_node 8 -m swin_quant train --cfg swin_tiny_patch4_window7_224 --data-path imagenet"""


@dataclass(frozen=True)
class TrainedFile(Evaluated):
    """The checkpoint that a training wrote, and its results; printed, the accuracy-delta table."""

    file: Path

    def load(self) -> Model:
        """The model that was trained."""
        return load(self.file)

    def __str__(self) -> str:
        return str(self.evaluation) or f"{self.file}: not scored: the pictures have no val split"

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_() or f"<p>{html.escape(str(self))}</p>"


def train(
    model: Annotated[ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[PictureSet | str | Path, Fields(PictureSet, "pictures", without=NOT_FOR_TRAINING)],
    folder: Annotated[str | Path | None, Parameter(name="--output")] = None,
    training: Annotated[Training, Fields(Training, "training")] = Training(),
    *,
    epochs: Annotated[int | None, Parameter(group="training")] = None,
    resume: Annotated[bool, Parameter(name="--continue", group="training")] = False,
    overwrite: Annotated[bool, Parameter(group="training")] = False,
    half: Literal["auto", "none", "float16", "bfloat16"] = "auto",
    no_eval: bool = False,
) -> TrainedFile:
    """Train a float model, from scratch or from weights, and score it on val where there is one.

    It writes <NAME>.pth, its run card and logs. Ranks that a launcher started share each step.

    Args:
        model: The model's config, and the weights to start from if a checkpoint is named.
        pictures: A place with train and val.
        folder: folder of the results (default: output/<NAME>)
        training: The recipe (default: the config's TRAIN and AUG), and changes of it.
        epochs: number of epochs (default: the recipe's)
        resume: go on with the run in the output folder
        overwrite: replace the run in the output folder
        half: type in which the float model is scored, too; auto: the device's
        no_eval: do not score the result

    Returns:
        The file, and its results.

    Raises:
        UsageError: Options that contradict each other, or a folder that holds another run.
    """
    world, place, start = this_world(), place_to_train_on(pictures), model.opened
    cfg = model.config(place.config_keys())
    recipe = load_recipe(training.recipe) if training.recipe else read_recipe(cfg)
    recipe = with_batch_size(training.change(recipe, epochs=epochs, batch_size=place.batch), cfg)
    recipe, note = with_precision(recipe, training, cfg, world)
    how = {"resume": resume, "overwrite": overwrite, "replace_head": model.replace_head, "note": note}
    request = training.request(folder_for(folder, cfg), start, place, **how)
    saved = snapshots_named(request.folder) if resume else nullcontext()
    with only_writer(request.folder, world), saved:  # until the last result is in the run card
        torch.manual_seed(cfg.SEED)
        module = build_model(training_config(cfg, recipe))
        source = load_float(module, start, replace_head=request.replace_head).record() if start else None
        path = request.folder / f"{cfg.MODEL.NAME}.pth"
        refuse_to_replace(path, request, world)
        names = read_class_names(cfg, start, request.replace_head)
        if start:
            start.forget()
        module, position, record, names = run_training(module, cfg, recipe, request, world, names)
        preprocess = Preprocess.from_config(cfg).to_dict()
        card = RunCard(cfg.MODEL.NAME, portable_config(cfg), preprocess, source, class_names=names)
        if world.is_main:
            save_float(module, path)
            card = replace(card, checkpoint={"file": path.name, "sha256": compute_sha256(path)}, training=record)
            card.write(path.with_suffix(".json"))
            log.info("checkpoint: %s", path)
        if no_eval or position.best_epoch is None:
            return TrainedFile(Evaluation((), card), path)
        trained = Model(module, card=card)
        val = PictureSet.from_config(cfg, "val", max_unreadable=request.max_unreadable)
        scored = score_model(trained, val, (), world, half)
        if world.is_main:
            trained.card.write(path.with_suffix(".json"))
    return TrainedFile(scored, path)
