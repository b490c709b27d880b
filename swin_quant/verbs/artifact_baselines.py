"""The float models beside artifacts: the user's, and the float form of the same weights on an engine."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import engine_named
from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import compute_sha256
from swin_quant.base.progress import log
from swin_quant.cards.lineage import find_original
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import NEEDS_MODULE, list_search_folders, load_engines, load_origin, no_checkpoint
from swin_quant.loading import giving, load_for_scoring, open_baseline
from swin_quant.model import Model
from swin_quant.quant.policy import Policy, load_policy
from swin_quant.score.baseline import Baseline, engines_beside, find_baseline, load_original, load_original_engines
from swin_quant.score.engine import HALF_TYPES, Engine, half_type
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import ExportTarget


@dataclass(frozen=True)
class Scoring:
    """How artifacts are scored.

    Args:
        pictures: A set on disk, or batches.
        engines: None: all installed.
        options: Of the engines.
        half: The half-precision baseline.
        checkpoint: The exported one, where it is not found.
        original: The float checkpoint that it came from, likewise.
        fake_quant: Score the simulation, too.
        own_float: Score the float form of the same weights on the engine, too, since int8 replaces it. It takes the
            place of torch's half precision if `half` is auto.
        origin: The model of a wrapped module, which no file can build.
        timed: The size of a batch of noise that is timed in place of scoring pictures.
    """

    pictures: PictureSet | Iterable[Any]
    engines: Sequence[str] | None = None
    options: EngineOptions = EngineOptions()
    half: str = "auto"
    checkpoint: str | None = None
    original: str | None = None
    fake_quant: bool = False
    own_float: bool = False
    origin: Model | None = None
    timed: int | None = None


@dataclass(frozen=True)
class PreparedArtifact:
    """An artifact with what it is scored by; `checkpoint`: None where it is not found."""

    artifact: Artifact
    engines: list[str]
    cfg: CfgNode
    preprocess: Preprocess | None
    checkpoint: Path | None

    @property
    def folders(self) -> list[Path]:
        """The folders to search for the float checkpoint, if it is not where the card says."""
        return [*list_search_folders(self.artifact), *([self.checkpoint.parent] if self.checkpoint else [])]

    @property
    def group(self) -> tuple[Any, ...]:
        """Artifacts of one group are scored in one pass."""
        checkpoint = compute_sha256(self.checkpoint) if self.checkpoint else None
        return checkpoint or self.artifact.file, self.preprocess


def load_baseline(group: Sequence[PreparedArtifact], scoring: Scoring, world: World) -> dict[str, Engine]:
    """float32 first, then half, then the simulation if that is asked for; nothing where no baseline is found."""
    first, half = group[0], half_type(scoring.half, world.device)
    card, origin, policies = first.artifact.card, None, list[Policy]()
    if card.wrapped and scoring.origin is None:
        log.warning("%s: no float model stands beside it: %s", first.artifact.file, NEEDS_MODULE)
        return {}
    if first.checkpoint is not None or scoring.origin:
        quantized = next((p for p in group if p.artifact.card.policy), first)
        origin, policies = load_origin(quantized.artifact, first.cfg, first.checkpoint, world, scoring.origin)
    policies = policies if scoring.fake_quant else []
    if scoring.origin and card.wrapped:
        baseline = open_baseline(scoring.origin, policies, world)
    else:
        baseline = find_baseline(card, first.folders, first.cfg, policies, world, scoring.original)
    if origin and (policies or baseline is None):
        return engines_beside(origin.module, world.device, half, policies, baseline)
    if baseline is None and (file := find_original(card, first.folders, scoring.original)):
        baseline = Baseline(load_original(first.cfg, file, world)[0])
    if baseline is None:
        log.warning("%s: no float model stands beside it: %s", first.artifact.file, no_checkpoint(first.artifact))
        return {}
    return load_original_engines(baseline, world.device, half)


def load_own_floats(
    group: Sequence[PreparedArtifact], scoring: Scoring, world: World, folder: Path
) -> dict[str, list[Engine]]:
    """Engine name -> the float forms of the same weights on it, where none is scored: in the half type that the engine
    would choose for float, or else in float32; in both if a type is asked for, or engines are only timed. They are
    exported into `folder`."""
    first, options = group[0], scoring.options
    if first.checkpoint is None or (first.artifact.card.wrapped and scoring.origin is None):
        return {}
    if not scoring.own_float or not any(p.artifact.card.policy for p in group):
        return {}
    found: dict[str, list[Engine]] = {}
    given = {name for p in group if not p.artifact.card.policy for name in p.engines}
    for name in dict.fromkeys(name for p in group for name in p.engines):
        backend = engine_named(name)
        runs_float = backend.runs_its_export and not backend.only_quantized
        if name in given or not runs_float or not backend.is_fast_on(backend.home or world.device.type):
            continue
        try:
            target, plain = ExportTarget.parse(name, "float"), load_policy("float")
            if scoring.origin is None:
                model, _ = load_for_scoring(first.cfg, first.checkpoint, [plain])
                module, card = model.network, giving(model.card, first.cfg)
            else:  # a wrapped module, which no file can build
                module, card = deepcopy(scoring.origin.network).cpu().eval(), scoring.origin.card
            artifact = target.write(module, card, first.checkpoint, folder / name, plain)
            offered = function(backend.float_types)() if backend.float_types else []
            half = [kind for kind in HALF_TYPES if kind in offered and kind == half_type("auto", world.device)]
            # float32 is the slowest of them to score; to time it takes seconds.
            is_extra = half and not options.float_type and scoring.timed is None
            asked = [] if is_extra else [options.float_type]
            for kind in dict.fromkeys([*asked, *half]):
                loaded = load_engines(artifact, [name], replace(options, float_type=kind))
                found.setdefault(name, []).extend(loaded.values())
        except (SwinQuantError, RuntimeError) as error:  # by exporters and engines
            log.warning("%s: its own float is not scored: %s", name, one_line(str(error)))
    return found
