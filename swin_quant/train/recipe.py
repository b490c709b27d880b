"""Recipes: how a model is trained, as frozen data, and the sources of recipes.

A recipe never changes during a run, and the run card records it. Sources: the shipped files of configs/recipes/, a
user's YAML file, and the config's TRAIN and AUG.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.files import shipped_files
from swin_quant.base.schema import SelfChecked, allow, checked, plain, unknown_key, within
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.config.sides import sides
from swin_quant.quant import CALIBRATORS

Count = Annotated[int, within(least=1)]
Share = Annotated[float, within(least=0, most=1)]
BelowOne = Annotated[float, within(least=0, most=0.999999)]
Positive = Annotated[float, within(above=0)]
Weight = Annotated[float, within(least=0)]


@dataclass(frozen=True)
class Optimizer(SelfChecked):
    """`lr` holds for `lr_batch` pictures a step and scales with the actual number; without `lr_batch` it does not
    scale.

    `amax_lr` is relative: a step moves a learned range by about this share. `layer_decay` multiplies the LR once for
    every block between a parameter and the head.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, within(above=0, most=100)] = 1e-3
    lr_batch: Count | None = None
    amax_lr: Annotated[float, within(above=0, most=1)] = 1e-3
    weight_decay: Annotated[float, within(least=0, most=10)] = 0.05
    layer_decay: Annotated[float, within(above=0, most=1)] = 1.0
    clip_grad: Positive | None = 5.0
    eps: Annotated[float, within(above=0, most=1)] = 1e-8
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    momentum: BelowOne = 0.9


@dataclass(frozen=True)
class Schedule(SelfChecked):
    """The share of the LR at every step: a linear warm-up from `warmup_from`, then a cosine down to `end`."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: Weight = 0.0
    warmup_from: Share = 0.001
    end: Share = 0.01


@dataclass(frozen=True)
class Augmentation(SelfChecked):
    """Random changes to training pictures. `crop` padded crops after adding `padding` pixels on each side, for small
    pictures; resized is timm's random resized crop."""

    crop: Literal["padded", "resized", "none"] = "resized"
    padding: Annotated[int, within(least=0, most=64)] = 4
    flip: Share = 0.5
    auto_augment: str | None = None
    color_jitter: Share = 0.0
    erase: Share = 0.0
    erase_mode: Literal["pixel", "const", "rand"] = "pixel"
    erase_count: Annotated[int, within(least=1, most=10)] = 1
    mixup: Annotated[float, within(least=0, most=100)] = 0.0
    cutmix: Annotated[float, within(least=0, most=100)] = 0.0
    mix_probability: Share = 1.0
    mix_switch: Share = 0.5
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    label_smoothing: Annotated[float, within(least=0, most=0.9)] = 0.0
    drop_path: Annotated[float, within(least=0, most=0.9)] | None = None


@dataclass(frozen=True)
class Distillation(SelfChecked):
    """Weights of the teacher's and the labels' parts of the loss; 0 leaves a part out. `compat` ft: FasterTransformer's
    KL (docs/reference, section 2.4)."""

    weight: Weight = 0.0
    temperature: Annotated[float, within(above=0, most=1000)] = 3.0
    compat: Literal["none", "ft"] = "none"
    labels: Weight = 1.0


@dataclass(frozen=True)
class Ranges(SelfChecked):
    """Ranges in QAT: `frozen`, `learned`, or `reestimated` every `every_epochs` until the share `until` of the run.

    `weights` and `activations` choose the ranges that are learned or re-estimated; the rest stay frozen. `initial`:
    start from the calibrated ranges, or re-estimate before the first step. A re-estimate uses `method` on `batches`
    batches of eight pictures.
    """

    mode: Literal["frozen", "learned", "reestimated"] = "frozen"
    initial: Literal["calibrated", "reestimated"] = "calibrated"
    method: Annotated[str, allow(CALIBRATORS)] = "percentile"
    weights: bool = True
    activations: bool = True
    every_epochs: Count = 1
    until: Annotated[float, within(above=0, most=1)] = 0.75
    batches: Count = 10


@dataclass(frozen=True)
class Memory(SelfChecked):
    """Ways to train a model larger than its GPU. `fsdp` shards it over ranks by FSDP2, `offload` keeps weights and
    optimizer state on the CPU, `checkpointing` recomputes a block's activations instead of keeping them."""

    checkpointing: bool = False
    fsdp: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Recipe(SelfChecked):
    """How a model is trained.

    `epoch_pictures`: pictures of an epoch, different ones each time; None: all. `batch_size` is for one rank and one
    accumulation step. `patience`: epochs without better validation accuracy before the run ends. `select`: the epoch
    whose weights are the result. `save_minutes`, `keep`: interval and number of snapshots. `compile` runs training
    steps through torch.compile. `freeze_stages`: the number of first stages that are not trained. `bits`: the precision
    that it was made for, such as W4A8.
    """

    name: str = "custom"
    description: str = ""
    bits: Annotated[str, allow(("", "W8A8", "W4A8", "W4A4"))] = ""
    epochs: Annotated[int, within(least=1, most=100_000)] = 10
    epoch_pictures: Count | None = None
    batch_size: Count | None = None
    accumulation_steps: Annotated[int, within(least=1, most=100_000)] = 1
    precision: Literal["O0", "O1", "O2", "O3"] = "O0"
    half: Literal["auto", "bfloat16", "float16"] = "auto"
    compile: bool = False
    ema: BelowOne = 0.0
    freeze_stages: Annotated[int, within(least=0, most=16)] = 0
    patience: Count | None = None
    select: Literal["best", "last"] = "best"
    save_minutes: Positive = 10.0
    keep: Annotated[int, within(least=1, most=1000)] = 2
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augmentation = field(default_factory=Augmentation)
    distill: Distillation = field(default_factory=Distillation)
    amax: Ranges = field(default_factory=Ranges)
    memory: Memory = field(default_factory=Memory)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a recipe file or run card; `recipe_from_dict` reads it back."""
        return plain(asdict(self))

    def having(self, values: Mapping[str, Any], source: str) -> "Recipe":
        """This recipe with `values` by dotted key, such as {"optimizer.lr": "1e-4"}. UsageError names `source`."""
        tree = self.to_dict()
        for key, value in values.items():
            *sections, leaf = key.split(".")
            node: Any = tree
            for section in sections:
                node = node.get(section) if isinstance(node, dict) else None
            if not isinstance(node, dict) or leaf not in node:
                raise UsageError(f"{source}: {unknown_key(key, list(_leaves(self.to_dict())))}")
            node[leaf] = value
        return recipe_from_dict(tree, source)


def recipe_from_dict(data: Any, source: str) -> Recipe:
    """A Recipe from plain data. UsageError names `source` and the key."""
    return checked(Recipe, data, source, text=True, error=UsageError)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values that are no mappings."""
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or a recipe from a YAML file. UsageError names the file and what is wrong."""
    path = shipped_or_file(name_or_path, shipped_files("recipes"), "recipe")
    data = read_yaml(path, "recipe")
    if isinstance(data, dict):
        data.setdefault("name", path.stem)
    return recipe_from_dict(data, str(path))


def read_recipe(cfg: CfgNode) -> Recipe:
    """The recipe in the keys TRAIN.* and AUG.* of a config: Microsoft's float training.

    Its learning rates are for 512 pictures a step. UsageError for an unknown scheduler or optimizer.
    """
    train, aug, lr = cfg.TRAIN, cfg.AUG, cfg.TRAIN.BASE_LR
    if not lr > 0:
        raise UsageError(f"TRAIN.BASE_LR is {lr}, but must be above 0")
    tree = {
        "name": "config",
        "description": f"TRAIN and AUG of {cfg.MODEL.NAME}",
        "epochs": train.EPOCHS,
        "accumulation_steps": max(train.ACCUMULATION_STEPS, 1),
        "precision": cfg.AMP_OPT_LEVEL or ("O1" if cfg.AMP_ENABLE else "O0"),
        "optimizer": {
            "name": train.OPTIMIZER.NAME.lower(),
            "lr": lr,
            "lr_batch": 512,
            "weight_decay": train.WEIGHT_DECAY,
            "layer_decay": train.LAYER_DECAY,
            "clip_grad": train.CLIP_GRAD or None,
            "eps": train.OPTIMIZER.EPS,
            "betas": list(train.OPTIMIZER.BETAS),
            "momentum": train.OPTIMIZER.MOMENTUM,
        },
        "schedule": {
            "name": train.LR_SCHEDULER.NAME,
            "warmup_epochs": train.WARMUP_EPOCHS,
            "warmup_from": min(train.WARMUP_LR / lr, 1.0),
            "end": min(train.MIN_LR / lr, 1.0),
        },
        "augment": {
            "crop": "resized" if max(sides(cfg.DATA.IMG_SIZE)) > 32 else "padded",
            "auto_augment": None if aug.AUTO_AUGMENT in ("", "none") else aug.AUTO_AUGMENT,
            "color_jitter": aug.COLOR_JITTER,
            "erase": aug.REPROB,
            "erase_mode": aug.REMODE,
            "erase_count": aug.RECOUNT,
            "mixup": aug.MIXUP,
            "cutmix": aug.CUTMIX,
            "mix_probability": aug.MIXUP_PROB,
            "mix_switch": aug.MIXUP_SWITCH_PROB,
            "mix_mode": aug.MIXUP_MODE,
            "label_smoothing": cfg.MODEL.LABEL_SMOOTHING,
        },
        "memory": {"checkpointing": train.USE_CHECKPOINT},
    }
    return recipe_from_dict(tree, "config (TRAIN, AUG)")
