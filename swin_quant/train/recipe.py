"""Recipes: everything that decides how a model is trained, as frozen data.

A recipe never changes while a run goes on, and it is what the run card records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import check_fields, checked, one_of, plain, unknown_key, within
from swin_quant.quant.names import CALIBRATORS

Count = Annotated[int, within(least=1)]
Share = Annotated[float, within(least=0, most=1)]
BelowOne = Annotated[float, within(least=0, most=0.999999)]
Positive = Annotated[float, within(above=0)]
Weight = Annotated[float, within(least=0)]


class Section:
    """A group of values, checked whenever one is made."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Optimizer(Section):
    """`lr` is meant for `lr_batch` pictures a step and scales with the batch that is used; None: as it stands.

    `amax_lr` is relative: a step moves a learned range by about that share. `layer_decay` multiplies the LR once for
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
class Schedule(Section):
    """A share of the LR for every step: a linear warm-up from `warmup_from`, then a cosine down to `end`."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: Weight = 0.0
    warmup_from: Share = 0.001
    end: Share = 0.01


@dataclass(frozen=True)
class Augmentation(Section):
    """How training pictures differ from those in the data: `padded` crops by up to `padding` pixels (small pictures),
    `resized` is timm's random resized crop."""

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
class Distillation(Section):
    """Weights of the teacher's parts of the loss, 0: none; `ft`: FasterTransformer's (docs/reference, section 2.4)."""

    weight: Weight = 0.0
    temperature: Annotated[float, within(above=0, most=1000)] = 3.0
    compat: Literal["none", "ft"] = "none"
    features: Weight = 0.0
    labels: Weight = 1.0

    @property
    def on(self) -> bool:
        return self.weight > 0 or self.features > 0


@dataclass(frozen=True)
class Ranges(Section):
    """What happens to amax in QAT: `frozen`, `learned`, or `reestimated` every `every_epochs` until `until` of the run.

    `weights` and `activations` choose whose ranges are learned or re-estimated; the others stay frozen. `initial`:
    start from the calibrated ranges, or re-estimate before the first step. `method` and `batches` of eight pictures are
    for estimating.
    """

    mode: Literal["frozen", "learned", "reestimated"] = "frozen"
    initial: Literal["calibrated", "reestimated"] = "calibrated"
    method: Annotated[str, one_of(CALIBRATORS)] = "percentile"
    weights: bool = True
    activations: bool = True
    every_epochs: Count = 1
    until: Annotated[float, within(above=0, most=1)] = 0.75
    batches: Count = 10


@dataclass(frozen=True)
class Memory(Section):
    """Ways to train a model that is larger than its GPU: FSDP2 shards over ranks, `offload` moves weights and optimizer
    state to the CPU, `checkpointing` computes activations of a block twice instead of keeping them."""

    checkpointing: bool = False
    fsdp: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Recipe(Section):
    """How a model is trained. `epoch_pictures` is how many pictures an epoch takes, others each time, None: all.

    `batch_size` is of one rank and one accumulation step; `patience` counts epochs without
    a better validation accuracy, `select` says which epoch's weights are the result, `save_minutes` and `keep` are
    about snapshots. `compile` runs training steps through torch.compile. The first `freeze_stages` stages, and what
    comes before them, stay as they are."""

    name: str = "custom"
    description: str = ""
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
        """Plain data, as in a recipe file and a run card; `recipe_from_dict` reads it back."""
        return plain(asdict(self))

    def having(self, values: Mapping[str, Any], source: str) -> "Recipe":
        """This recipe with `values` by dotted key, e.g. {"optimizer.lr": "1e-4"}; UsageError names `source`."""
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
    """Check plain data and make a Recipe of it; UsageError names `source` and the key."""
    return checked(Recipe, data, source, text=True, error=UsageError)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all that is not a mapping."""
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
