"""The arguments that every training takes: a recipe, keys of it that have an argument of their own, and pictures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from yacs.config import CfgNode

from swin_quant.base.arguments import Parameter
from swin_quant.base.errors import UsageError
from swin_quant.base.extras import library
from swin_quant.checkpoint.identify import config_given
from swin_quant.checkpoint.opened import Checkpoint
from swin_quant.data.picture_set import PictureSet
from swin_quant.train.recipe import Recipe
from swin_quant.train.run import Request

_CONSTANT, _OF_CONFIG = "constant", "config"


@dataclass(frozen=True)
class Training:
    """A recipe, and keys of it that have an argument of their own.

    Args:
        recipe: how to train: a shipped recipe or a YAML file
        set: set keys of the recipe, as KEY=VALUE
        lr: optimizer.lr
        schedule: of the learning rate; constant: without warm-up, as FasterTransformer's
        drop_path: augment.drop_path; config: MODEL.DROP_PATH_RATE
        freeze_stages: the first N stages and what comes before them stay as they are
        accumulation_steps: batches a step of the optimizer
        use_checkpoint: activation checkpointing
        compile: torch.compile: faster after a slow start
        amp_opt_level: precision of training
        fsdp: shard weights and optimizer over ranks (FSDP2)
        offload: with `fsdp`: keep them on the CPU
        tensorboard: log to TensorBoard too (extra `logs`)
        plot: form of the final plot (default png, where matplotlib is)
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
    tensorboard: bool = False
    plot: Literal["png", "svg"] | None = None

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
            "schedule.warmup_epochs": 0 if self.schedule == _CONSTANT else None,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        given = {key: value for key, value in keys.items() if value is not None}
        if self.drop_path:
            given["augment.drop_path"] = None if self.drop_path == _OF_CONFIG else self.drop_path
        return recipe.having({key: value for key, _, value in pairs}, "‹set›").having(given, "command line")

    def request(self, folder: Path, start: Checkpoint | None, pictures: PictureSet, **more: Any) -> Request:
        """The run that is asked for, beside config and recipe. UsageError for a plot that nothing here can draw."""
        if self.plot:
            library("matplotlib", "logs")
        share = 0.01 if pictures.max_unreadable is None else pictures.max_unreadable
        how: dict[str, Any] = {"tensorboard": self.tensorboard, "plot": self.plot, "max_unreadable": share}
        return Request(folder, start, **how, **more)


@dataclass(frozen=True)
class Qat:
    """How a teacher is learned from.

    Args:
        teacher_cfg: its configuration, if it is another model
        distill_weight: distill.weight
        temperature: distill.temperature
        distill_compat: ft: FasterTransformer's loss, to the letter
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
