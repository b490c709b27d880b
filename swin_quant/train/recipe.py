"""Recipes: everything that decides how a model is trained, as frozen data.

A recipe never changes while a run goes on, and it is what the run card records.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from swin_quant.base.errors import UsageError
from swin_quant.quant.names import CALIBRATORS
from swin_quant.train.section import Section, leaves, number, one_of, plain, section_of, unknown_key


@dataclass(frozen=True)
class Optimizer(Section):
    """`lr` is meant for `lr_batch` pictures a step and scales with the batch that is used; None: as it stands.

    `amax_lr` is relative: a step moves a learned range by about that share. `layer_decay` multiplies the LR once for
    every block between a parameter and the head.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = number(1e-3, above=0, most=100)
    lr_batch: int | None = number(None, least=1)
    amax_lr: float = number(1e-3, above=0, most=1)
    weight_decay: float = number(0.05, least=0, most=10)
    layer_decay: float = number(1.0, above=0, most=1)
    clip_grad: float | None = number(5.0, above=0)
    eps: float = number(1e-8, above=0, most=1)
    betas: tuple[float, float] = number((0.9, 0.999), least=0, most=0.999999)
    momentum: float = number(0.9, least=0, most=0.999999)


@dataclass(frozen=True)
class Schedule(Section):
    """A share of the LR for every step: a linear warm-up from `warmup_from`, then a cosine down to `end`."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: float = number(0.0, least=0)
    warmup_from: float = number(0.001, least=0, most=1)
    end: float = number(0.01, least=0, most=1)


@dataclass(frozen=True)
class Augmentation(Section):
    """How training pictures differ from those in the data: `padded` crops by up to `padding` pixels (small pictures),
    `resized` is timm's random resized crop."""

    crop: Literal["padded", "resized", "none"] = "resized"
    padding: int = number(4, least=0, most=64)
    flip: float = number(0.5, least=0, most=1)
    auto_augment: str | None = None
    color_jitter: float = number(0.0, least=0, most=1)
    erase: float = number(0.0, least=0, most=1)
    erase_mode: Literal["pixel", "const", "rand"] = "pixel"
    erase_count: int = number(1, least=1, most=10)
    mixup: float = number(0.0, least=0, most=100)
    cutmix: float = number(0.0, least=0, most=100)
    mix_probability: float = number(1.0, least=0, most=1)
    mix_switch: float = number(0.5, least=0, most=1)
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    label_smoothing: float = number(0.0, least=0, most=0.9)
    drop_path: float | None = number(None, least=0, most=0.9)


@dataclass(frozen=True)
class Distillation(Section):
    """Weights of the teacher's parts of the loss, 0: none; `ft`: FasterTransformer's (docs/reference, section 2.4)."""

    weight: float = number(0.0, least=0)
    temperature: float = number(3.0, above=0, most=1000)
    compat: Literal["none", "ft"] = "none"
    features: float = number(0.0, least=0)
    labels: float = number(1.0, least=0)


@dataclass(frozen=True)
class Ranges(Section):
    """What happens to amax in QAT: `frozen`, `learned`, or `reestimated` every `every_epochs` until `until` of the run.

    `weights` and `activations` choose whose ranges are learned or re-estimated; the others stay frozen. `initial`:
    start from the calibrated ranges, or re-estimate before the first step. `method` and `batches` of eight pictures are
    for estimating.
    """

    mode: Literal["frozen", "learned", "reestimated"] = "frozen"
    initial: Literal["calibrated", "reestimated"] = "calibrated"
    method: str = one_of("percentile", CALIBRATORS)
    weights: bool = True
    activations: bool = True
    every_epochs: int = number(1, least=1)
    until: float = number(0.75, above=0, most=1)
    batches: int = number(10, least=1)


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
    about snapshots. `compile` runs training steps through torch.compile."""

    name: str = "custom"
    description: str = ""
    epochs: int = number(10, least=1, most=100_000)
    epoch_pictures: int | None = number(None, least=1)
    batch_size: int | None = number(None, least=1)
    accumulation_steps: int = number(1, least=1, most=100_000)
    precision: Literal["O0", "O1", "O2", "O3"] = "O0"
    half: Literal["auto", "bfloat16", "float16"] = "auto"
    compile: bool = False
    ema: float = number(0.0, least=0, most=0.999999)
    patience: int | None = number(None, least=1)
    select: Literal["best", "last"] = "best"
    save_minutes: float = number(10.0, above=0)
    keep: int = number(2, least=1, most=1000)
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
                raise UsageError(f"{source}: {unknown_key(key, list(leaves(self.to_dict())))}")
            node[leaf] = value
        return recipe_from_dict(tree, source)


def recipe_from_dict(data: Any, source: str) -> Recipe:
    """Check plain data and make a Recipe of it; UsageError names `source` and the key."""
    return section_of(Recipe, data, source)
