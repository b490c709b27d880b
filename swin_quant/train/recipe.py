"""Recipes: everything that decides how a model is trained, as frozen data that YAML and the command line can set.

A recipe never changes while a run goes on, and it is what the run card records. Every field has a type and a range;
a key that is unknown, or a value that cannot be meant (an LR of 0, NaN), is an error of one line.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from swin_quant.errors import UsageError

S = TypeVar("S", bound="Section")


def number(default: float | None, above: float = -inf, least: float = -inf, most: float = inf) -> Any:
    """A field of a recipe with the range of its values: `above` is left out of it, `least` and `most` are in it."""
    return field(default=default, metadata={"above": above, "least": least, "most": most})


@dataclass(frozen=True)
class Section:
    """A group of fields, checked against their types and ranges whenever one is made."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, bounds = getattr(self, item.name), item.metadata
            if not bounds or value is None:
                continue
            for entry in value if isinstance(value, tuple) else (value,):
                if not isfinite(entry) or entry <= bounds["above"] or not bounds["least"] <= entry <= bounds["most"]:
                    raise UsageError(f"{item.name} is {value}, but must be {_range(bounds)}")


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
    """Weights of the teacher's parts of the loss, 0 for none; `ft` computes FasterTransformer's (spec, section 2.4)."""

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
    method: Literal["percentile", "mse", "entropy", "max"] = "percentile"
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
    """How a model is trained. `batch_size` is of one rank and one accumulation step; `patience` counts epochs without
    a better validation accuracy, `select` says which epoch's weights are the result, `save_minutes` and `keep` are
    about snapshots."""

    name: str = "custom"
    description: str = ""
    epochs: int = number(10, least=1, most=100_000)
    batch_size: int | None = number(None, least=1)
    accumulation_steps: int = number(1, least=1, most=100_000)
    precision: Literal["O0", "O1", "O2", "O3"] = "O0"
    half: Literal["auto", "bfloat16", "float16"] = "auto"
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
        return _plain(asdict(self))

    def having(self, values: Mapping[str, Any], source: str) -> "Recipe":
        """This recipe with `values` by dotted key, e.g. {"optimizer.lr": "1e-4"}; UsageError names `source`."""
        tree = self.to_dict()
        for key, value in values.items():
            *sections, leaf = key.split(".")
            node = tree
            for section in sections:
                node = node.get(section) if isinstance(node, dict) else None
            if not isinstance(node, dict) or leaf not in node:
                raise UsageError(f"{source}: {_unknown(key, list(_leaves(self.to_dict())))}")
            node[leaf] = value
        return recipe_from_dict(tree, source)


def recipe_from_dict(data: Any, source: str) -> Recipe:
    """Check plain data and make a Recipe of it; UsageError names `source` and the key."""
    return _section(Recipe, data, source, "")


def _section(kind: type[S], data: Any, source: str, prefix: str) -> S:
    if not isinstance(data, Mapping):
        raise UsageError(f"{source}: {prefix.rstrip('.') or 'a recipe'} must be a mapping, not {data!r:.60}")
    types, values = get_type_hints(kind), {}
    for key, value in data.items():
        where = f"{source}: {prefix}{key}"
        if key not in types:
            raise UsageError(f"{source}: {_unknown(f'{prefix}{key}', [prefix + name for name in types])}")
        values[key] = _value(types[key], value, where, f"{prefix}{key}.", source)
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{source}: {prefix}{error}") from error


def _value(kind: Any, value: Any, where: str, prefix: str, source: str) -> Any:
    if is_dataclass(kind):
        return _section(kind, value, source, prefix)
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise UsageError(f"{where} is {value!r:.60}, but must be one of {', '.join(options)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(options):
            raise UsageError(f"{where} must be {len(options)} numbers, not {value!r:.60}")
        return tuple(_scalar(options[0], entry, where) for entry in value)
    if type(None) in options:
        return None if value in (None, "none") else _scalar(options[0], value, where)
    return _scalar(kind, value, where)


def _scalar(kind: type, value: Any, where: str) -> Any:
    """Text is read as a number where one is due: YAML takes `1e-4` for text, and so does a command line."""
    noun = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    try:
        if isinstance(value, str) and kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if isinstance(value, str) and kind is not str:
            return kind(value)
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
    except (ValueError, KeyError, OverflowError):
        pass
    raise UsageError(f"{where} must be {noun}, not {value!r:.60}")


def _range(bounds: Mapping[str, float]) -> str:
    words = [f"above {bounds['above']:g}"] if bounds["above"] > -inf else []
    words += [f"at least {bounds['least']:g}"] if bounds["least"] > -inf else []
    words += [f"at most {bounds['most']:g}"] if bounds["most"] < inf else []
    return " and ".join(words)


def _unknown(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1)
    return f"unknown key {key!r:.80}" + (f"; did you mean {close[0]}?" if close else "")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
