"""Settings of a search: the limits of a policy, the pictures that losses are measured on, the engine that is timed."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from yacs.config import CfgNode

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import targets
from swin_quant.base.cpu import cpu_kind
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, versions
from swin_quant.config.load import portable_config
from swin_quant.config.outputs import need_logits
from swin_quant.data.loader import DrawnBatches, default_workers, seeded_order
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.data.pictures import Pictures, SomePictures
from swin_quant.data.prepared import Prepared
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import Sampling, digest, sample
from swin_quant.data.sources import TRAIN
from swin_quant.model import Model
from swin_quant.models.classifier import Classifier
from swin_quant.quant import SEARCHED_ON
from swin_quant.quant.policy import Policy, described, load_policy
from swin_quant.quant.search import Budget, check_limit
from swin_quant.score.bench import BenchPlan
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import float_type_options

_FILES = ("RESUME", "PRETRAINED")  # keys of a config that name a checkpoint, which is known by its hash
FEW = 100  # pictures times points: a sample of fewer may show no difference and still hide the drop
_LEAST_DROP = 1e-6  # points: nobody has the pictures to tell less
_OF_IMAGES = ("DATA_PATH", "IMG_SIZE", "INTERPOLATION", "MEAN", "STD")  # keys of a config that change the images


@dataclass(frozen=True)
class SearchPictures:
    """Pictures that losses are measured on: batches of images [B, channels, S, S].

    `names` identify the pictures: the names of all drawn ones, unreadable ones included. `others` reads further
    pictures, at most as many again; None where there are none.
    """

    batches: list[Tensor]
    names: list[str]
    others: Callable[[], list[Tensor]] | None = None

    @classmethod
    def drawn(cls, pictures: PictureSet, sampling: Sampling, preprocess: Preprocess) -> "SearchPictures":
        """A sample of a place on disk. SwinQuantError, which names some, where too many of them cannot be read."""
        opened = pictures.open()
        left = sample(len(opened), len(opened), sampling.seed)[sampling.count :]
        others = partial(_read, SomePictures(opened, left), sampling, preprocess, pictures.workers) if left else None
        names = seeded_order(opened, sampling.seed)[: sampling.count]
        return cls(_read(opened, sampling, preprocess, pictures.workers), names, others)

    @classmethod
    def of_batches(cls, source: Iterable[Any], prepared: Prepared) -> "SearchPictures":
        """Tensors, which have no names: a hash of their values identifies them. UsageError for no batch."""
        images, seen = [batch.images.cpu() for batch in batches(source, False, prepared)], hashlib.sha256()
        if not images:
            raise UsageError("pictures: there is no batch to measure with")
        for one in images:
            seen.update(one.numpy(force=True).tobytes())
        return cls(images, [seen.hexdigest()])


def _read(pictures: Pictures, sampling: Sampling, preprocess: Preprocess, workers: int) -> list[Tensor]:
    sampling = replace(sampling, count=min(sampling.count, len(pictures)))
    drawn = DrawnBatches(pictures, preprocess, sampling, workers=default_workers(workers, 1, sampling.count))
    images = [batch.images for _, batch in drawn if len(batch.labels)]
    if lost := drawn.limit.names:
        log.warning("%d pictures are unreadable, others are taken where there are more: %s", len(lost), listed(lost))
    return images


@dataclass(frozen=True)
class SearchedNetwork:
    """The network whose policies are compared. `facts`: its outputs depend on them and its weights alone.

    `cfg` is None for a wrapped module, which is built from none.
    """

    name: str
    facts: Mapping[str, Any]
    cfg: CfgNode | None = None

    @classmethod
    def of_config(cls, cfg: CfgNode) -> "SearchedNetwork":
        """UsageError for a network without logits."""
        need_logits(cfg.MODEL.OUTPUT_KIND, "search")
        config = portable_config(cfg)
        facts = {
            "config": {"MODEL": config["MODEL"] | dict.fromkeys(_FILES), "TEST": config["TEST"]},
            "images": {key: config["DATA"][key] for key in _OF_IMAGES},
        }
        return cls(cfg.MODEL.NAME, facts, cfg)

    @classmethod
    def of_wrapped(cls, network: Classifier, card: RunCard) -> "SearchedNetwork":
        """UsageError for a network without logits, and for one that was not wrapped."""
        if card.wrapped is None:
            raise UsageError(f"{card.name}: was neither loaded nor wrapped, and this needs one: give it to `wrap`")
        need_logits(network.output_kind, "search")
        return cls(card.name, {"wrapped": card.wrapped, "images": card.preprocess})


@dataclass(frozen=True)
class SearchSettings:
    """A search for a policy of the calibrated `checkpoint`: `base`, some layers of which stay float.

    `base` None is the engine's best built-in policy. `budget` limits the loss, `max_ms` the milliseconds of a `batch`.
    Losses are measured on `pictures`, which should not be the ones that score the result. `folder` gets the policy and
    the journal. UsageError for a search without a limit, and for an engine that cannot be searched for.
    """

    network: SearchedNetwork
    checkpoint: str
    engine: str
    folder: Path
    base: Policy | None = None
    budget: Budget = Budget()
    max_ms: float | None = None
    batch: int = 1
    options: EngineOptions = EngineOptions()
    rounds: int = 5
    seconds: float = 0.5
    pictures: PictureSet | SearchPictures = PictureSet("", TRAIN)

    def __post_init__(self) -> None:
        _ = self.sampling  # refuses impossible numbers
        device = self.options.device
        run = {name: one for name, one in targets().items() if one.runs_its_export}
        fit = [name for name, one in run.items() if one.is_fast_on(device)]
        fixed = [name for name, one in run.items() if one.exporting.only]
        if self.engine not in fit + fixed:
            without = f"; without latency there is a choice for {', '.join(fixed)}" if fixed else ""
            raise UsageError(f"‹engine› {self.engine}: latency is measured on {', '.join(fit)}{without}")
        if self.engine in fixed and self.base:
            only = ", ".join(self.backend.exporting.policies)
            raise UsageError(f"‹policy›: {self.engine} runs {only} only: one of these is chosen, leave it out")
        if not self.backend.is_installed:
            raise UsageError(f"‹engine› {self.engine}: is not installed: {self.backend.remedy}")
        BenchPlan((self.batch,), self.rounds, self.seconds)  # refuses impossible numbers
        _ = self.exporter_options  # refuses a type that the engine does not have
        if self.max_ms is None and self.budget == Budget():
            raise UsageError("no budget: give ‹max_drop›, ‹min_agreement›, ‹min_sqnr› or ‹max_ms›")
        check_limit("max_ms", self.max_ms)
        if self.max_ms is not None and not self.is_timed:
            raise UsageError(f"‹max_ms›: latency of {self.engine} is not measured here: leave it out")

    @property
    def backend(self) -> Backend:
        return targets()[self.engine]

    @cached_property
    def exporter_options(self) -> dict[str, str]:
        """Exporter options that make the file run in the asked float type on the engine."""
        return float_type_options(self.backend, self.backend, self.options.float_type)

    @property
    def is_timed(self) -> bool:
        """Whether latency is measured. An engine that is only emulated here runs a few policies, and each of them costs
        the nodes that it leaves float."""
        return self.backend.is_fast_on(self.options.device)

    @property
    def start(self) -> Policy:
        """The policy whose layers are switched; no other candidate has its name."""
        if self.base:
            return replace(self.base, name=described(self.base))
        return load_policy(self.backend.exporting.policies_for(self.network.facts.get("config", {}))[0])

    @property
    def file(self) -> Path:
        """The file of the policy that is found; the journal lies beside it."""
        return self.folder / f"{self.network.name}_auto_{self.engine}.yaml"

    @property
    def journal(self) -> Path:
        return self.file.with_suffix(".journal.json")

    def tell_if_few(self, pictures: int) -> None:
        """Warn where so many pictures may show no difference and still hide the drop of the budget."""
        drop = self.budget.max_drop
        if drop and pictures * drop < FEW:
            log.warning(
                "%d pictures hardly tell a drop of %g points: give %.0f or more (‹pictures›)",
                pictures,
                drop,
                math.ceil(FEW / max(drop, _LEAST_DROP)),
            )

    @property
    def limits(self) -> str:
        """The limits in words."""
        limits = [str(self.budget)] if str(self.budget) else []
        return ", ".join([*limits, f"at most {self.max_ms:g} ms"] if self.max_ms is not None else limits)

    def unmet(self, file: Path) -> str:
        """Say that no policy keeps the limits, not even the one in `file`."""
        return f"the budget cannot be met ({self.limits}): the best that was found is {file}"

    @property
    def flags(self) -> list[str]:
        """The limits as flags of the command."""
        limits = {**asdict(self.budget), "max_ms": self.max_ms}
        return [f"--{key.replace('_', '-')} {float(value)!r}" for key, value in limits.items() if value is not None]

    @property
    def found(self) -> str:
        """The journal's name for the result."""
        return f"found: {' '.join(self.flags)}"

    @cached_property
    def sampling(self) -> Sampling:
        """The sample of a place on disk: another draw than the one that calibrates."""
        place = self.pictures
        if isinstance(place, SearchPictures):
            return Sampling(split="")  # nobody said which split
        count = SEARCHED_ON if place.count is None else place.count
        return Sampling(count, place.split or "", place.seed + 1, max_unreadable=place.max_unreadable)

    @cached_property
    def pictures_sha256(self) -> str:
        """The hash of the pictures' names."""
        if isinstance(self.pictures, SearchPictures):
            return digest(self.pictures.names)
        return digest(seeded_order(self.pictures.open(), self.sampling.seed)[: self.sampling.count])

    def read(self, model: Model) -> SearchPictures:
        """The pictures as the model takes them."""
        if isinstance(self.pictures, SearchPictures):
            return self.pictures
        return SearchPictures.drawn(self.pictures, self.sampling, model.preprocess)

    def subject(self, checkpoint_sha256: str) -> dict[str, Any]:
        """Everything that results depend on, as plain data."""
        place = Path(self.pictures.path).name if isinstance(self.pictures, PictureSet) else ""
        return {
            "checkpoint": checkpoint_sha256,
            **self.network.facts,
            "images": self.network.facts["images"] | {"DATA_PATH": place},
            "base": self.start.sha256,
            "engine": self.engine,
            "batch": self.batch,
            "timing": {"rounds": self.rounds, "seconds": self.seconds} if self.is_timed else None,
            "pictures": self.pictures_sha256,
            "sampling": asdict(self.sampling),
            "options": asdict(self.options),
            "cpu": cpu_kind(),
            "versions": versions(),
        }
