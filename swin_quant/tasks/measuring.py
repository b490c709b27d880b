"""What a search is to measure, and how."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import targets
from swin_quant.base.errors import UsageError
from swin_quant.base.files import sha256_of
from swin_quant.cards.versions import versions
from swin_quant.config.load import portable_config
from swin_quant.data.sampling import digest
from swin_quant.quant.names import SEARCHED_ON
from swin_quant.quant.policies import described, load_policy
from swin_quant.quant.policy import Policy
from swin_quant.score.bench import BenchPlan
from swin_quant.score.cpu import features, usable_cores
from swin_quant.score.options import EngineOptions
from swin_quant.tasks.measured_on import MeasuredOn, drawn
from swin_quant.tasks.sensitivity import Sampling
from swin_quant.verbs.export_target import float_type_options

_FILES = ("RESUME", "PRETRAINED")  # of a config: `checkpoint` is known by its hash
_OF_IMAGES = ("DATA_PATH", "IMG_SIZE", "INTERPOLATION", "MEAN", "STD")  # of a config: which images, and how they look


@dataclass(frozen=True)
class Measuring:
    """What is measured and how: the calibrated `checkpoint` under policies that leave layers of `base` float.

    `base` None: the engine's best built-in policy. `sampling` says on which pictures losses are measured: unlabelled
    ones, and not those that will score the result; `pictures` None are of the config's data. Milliseconds are of a
    `batch`. `folder` gets the journal.
    """

    cfg: CfgNode
    checkpoint: str
    engine: str
    folder: Path
    base: Policy | None = None
    batch: int = 1
    sampling: Sampling = Sampling(SEARCHED_ON, seed=1)
    options: EngineOptions = EngineOptions()
    rounds: int = 5
    seconds: float = 0.5
    pictures: MeasuredOn | None = None

    def __post_init__(self) -> None:
        device = self.options.device
        run = {name: one for name, one in targets().items() if one.runs_its_export}
        fit = [name for name, one in run.items() if one.is_fast_on(device)]
        fixed = [name for name, one in run.items() if one.exporting.only]
        if self.engine not in fit + fixed:
            without = f"; without latency there is a choice for {', '.join(fixed)}" if fixed else ""
            raise UsageError(f"‹engine› {self.engine}: latency is measured on {', '.join(fit)}{without}")
        if self.engine in fixed and self.base:
            raise UsageError(f"‹policy›: {self.engine} runs {', '.join(self.backend.exporting.policies)} only: "
                             "one of these is chosen, leave it out")  # fmt: skip
        if not self.backend.is_installed:
            raise UsageError(f"‹engine› {self.engine}: is not installed: {self.backend.remedy}")
        BenchPlan((self.batch,), self.rounds, self.seconds)
        self.told_exporter  # noqa: B018  (a type that the engine does not have is said before any work)

    @property
    def backend(self) -> Backend:
        return targets()[self.engine]

    @cached_property
    def told_exporter(self) -> dict[str, str]:
        """How an export is to be, for the engine to run it as the options say."""
        return float_type_options(self.backend, self.backend, self.options.float_type)

    @property
    def is_timed(self) -> bool:
        """Whether the engine's latency is measured; else it is one that runs few policies, and those only emulated:
        each of them costs the nodes that it leaves float."""
        return self.backend.is_fast_on(self.options.device)

    @property
    def start(self) -> Policy:
        """The policy whose layers are switched; its name is that of no other candidate."""
        if self.base:
            return replace(self.base, name=described(self.base))
        return load_policy(self.backend.exporting.policies[0])

    @property
    def name(self) -> str:
        """Of the files that are written."""
        return f"{self.cfg.MODEL.NAME}_auto_{self.engine}"

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.name}.journal.json"

    @cached_property
    def pictures_sha256(self) -> str:
        """Of the names of the pictures."""
        return digest(self.pictures.names if self.pictures else drawn(self.cfg, self.sampling))

    @property
    def subject(self) -> dict[str, Any]:
        """What results depend on: plain data."""
        config = portable_config(self.cfg)
        place = {"DATA_PATH": self.pictures.place} if self.pictures else {}
        return {
            "checkpoint": sha256_of(self.checkpoint),
            "config": {"MODEL": config["MODEL"] | dict.fromkeys(_FILES), "TEST": config["TEST"]},
            "images": {key: config["DATA"][key] for key in _OF_IMAGES} | place,
            "base": self.start.sha256,
            "engine": self.engine,
            "batch": self.batch,
            "timing": {"rounds": self.rounds, "seconds": self.seconds} if self.is_timed else None,
            "pictures": self.pictures_sha256,
            "sampling": asdict(self.sampling),
            "options": asdict(self.options),
            "cpu": {"cores": usable_cores(), "features": features(("avx2", "avx512f", "avx512_vnni", "amx_int8"))},
            "versions": versions(),
        }
