"""Scoring artifacts: the float checkpoint first, then every artifact on every engine, in one pass per checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import engine_named
from swin_quant.base.distributed import World, this_world
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import compute_sha256
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update, with_results
from swin_quant.cards.lineage import find_original
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import Result
from swin_quant.config.outputs import count_classes, need_logits
from swin_quant.config.sides import sides
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.exported import (
    NEEDS_MODULE,
    find_checkpoint,
    list_engine_names,
    list_search_folders,
    load_engines,
    load_origin,
    no_checkpoint,
    on_its_device,
    prepared_by,
    read_config,
)
from swin_quant.loading import open_baseline
from swin_quant.model import Model
from swin_quant.quant.policy import Policy
from swin_quant.score.baseline import (
    Baseline,
    engines_beside,
    find_baseline,
    load_original,
    load_original_engines,
    whose_weights,
)
from swin_quant.score.engine import HALF_TYPES, Engine, half_type
from swin_quant.score.options import EngineOptions
from swin_quant.score.scoring import ModelInputs, score_engines
from swin_quant.verbs.export_target import ExportTarget, export_checkpoint
from swin_quant.verbs.timing import Latency, compare_latency


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


ELSEWHERE = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}  # a card's values name no folder of this machine


@dataclass(frozen=True)
class Scored(Artifact):
    """An artifact with results in its card, and the newly measured ones."""

    measured: tuple[Result, ...] = ()
    latencies: tuple[Latency, ...] = ()


def score_artifacts(artifacts: Sequence[Artifact], scoring: Scoring) -> list[Scored]:
    """The artifacts with results in their cards, nothing written: each with its baseline's and its own.

    Artifacts of one checkpoint and preprocessing are scored in one pass with one float baseline. One whose checkpoint
    is not found is scored without a baseline: no delta then, and a warning. Everything that can be refused (an engine
    that is not installed, a checkpoint of another hash) is refused before a picture is read.
    """
    world = this_world()
    groups: dict[tuple[Any, ...], list[_Prepared]] = {}
    engines = [list_engine_names(artifact, scoring.engines) for artifact in artifacts]
    for artifact, names in zip(artifacts, engines, strict=True):
        prepared = _prepare(artifact, names, scoring)
        groups.setdefault(prepared.group, []).append(prepared)
    scored: dict[Path, Scored] = {}
    for group in groups.values():
        with TemporaryDirectory(prefix="swin-quant-float-") as folder:
            loaded = {p.artifact.file: load_engines(p.artifact, p.engines, scoring.options) for p in group}
            own = _own_floats(group, scoring, world, Path(folder)) if scoring.own_float else {}
            scored |= {artifact.file: artifact for artifact in _score_group(group, scoring, world, loaded, own)}
    return [scored[artifact.file] for artifact in artifacts]


@dataclass(frozen=True)
class _Prepared:
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


def _prepare(artifact: Artifact, engines: list[str], scoring: Scoring) -> _Prepared:
    cfg = read_config(artifact, ELSEWHERE)
    if scoring.timed is None:
        need_logits(cfg.MODEL.OUTPUT_KIND, "accuracy")
    elif artifact.card.wrapped and "inputs" in artifact.card.wrapped:
        raise UsageError(f"{artifact.file}: takes several inputs: time `sq.artifact(FILE).load()` in your own loop")
    checkpoint = find_checkpoint(artifact, scoring.checkpoint)
    prepared = _Prepared(artifact, engines, cfg, prepared_by(artifact).preprocess, checkpoint)
    if scoring.original:
        find_original(artifact.card, prepared.folders, scoring.original)  # refuse before anything is scored
    return prepared


def _own_floats(group: Sequence[_Prepared], scoring: Scoring, world: World, folder: Path) -> dict[str, list[Engine]]:
    """Engine name -> the float forms of the same weights on it, where none is scored: in the type of the artifact's
    float layers, and in the half type that the engine would choose for float. They are exported into `folder`."""
    first, options = group[0], scoring.options
    if first.checkpoint is None or (first.artifact.card.wrapped and scoring.origin is None):
        return {}
    if not any(p.artifact.card.policy for p in group):
        return {}
    found: dict[str, list[Engine]] = {}
    given = {name for p in group if not p.artifact.card.policy for name in p.engines}
    for name in dict.fromkeys(name for p in group for name in p.engines):
        backend = engine_named(name)
        runs_float = backend.runs_its_export and not backend.only_quantized
        if name in given or not runs_float or not backend.is_fast_on(backend.home or world.device.type):
            continue
        try:
            artifact = _float_artifact(first, first.checkpoint, name, folder / name, scoring.origin)
            offered = function(backend.float_types)() if backend.float_types else []
            half = [kind for kind in HALF_TYPES if kind in offered and kind == half_type("auto", world.device)]
            for kind in dict.fromkeys([options.float_type, *half]):
                found.setdefault(name, []).extend(
                    load_engines(artifact, [name], replace(options, float_type=kind)).values()
                )
        except (SwinQuantError, RuntimeError) as error:  # by exporters and engines
            log.warning("%s: its own float is not scored: %s", name, one_line(str(error)))
    return found


def _float_artifact(first: _Prepared, checkpoint: Path, name: str, folder: Path, origin: Model | None) -> Artifact:
    """The float form of a checkpoint for a backend, or that of `origin`, a wrapped module, which no file can build."""
    if origin is None:
        return export_checkpoint(checkpoint, name, folder, first.cfg, precision="float")[0]
    target, module = ExportTarget.parse(name, "float"), deepcopy(origin.network).cpu().eval()
    return target.write(module, origin.card, checkpoint, folder, target.policy(None, None))


def _score_group(
    group: Sequence[_Prepared],
    scoring: Scoring,
    world: World,
    loaded: Mapping[Path, Mapping[str, Engine]],
    own: Mapping[str, Sequence[Engine]],
) -> list[Scored]:
    first = group[0]
    scoring = replace(scoring, half="none") if own and scoring.half == "auto" else scoring
    baseline = _baseline(group, scoring, world)
    floats = {name: {f"{one.label} on {name}": one for one in some} for name, some in own.items()}
    engines = baseline | {key: one for some in floats.values() for key, one in some.items()}
    engines |= {key: engine for engines in loaded.values() for key, engine in engines.items()}
    if scoring.timed is not None:
        wrapped = first.artifact.card.wrapped
        shape = tuple(wrapped["shape"]) if wrapped else (3, *sides(first.cfg.DATA.IMG_SIZE))
        found = compare_latency(engines, scoring.timed, shape)
        return [Scored(p.artifact.file, p.artifact.card, (), () if number else found) for number, p in enumerate(group)]
    cfg, pictures = first.cfg, scoring.pictures
    if isinstance(pictures, PictureSet):
        pictures = pictures.settled(cfg)
    by = ModelInputs(prepared_by(first.artifact), count_classes(cfg), first.artifact.card.class_names)
    results = score_engines(engines, pictures, by, world)
    scored = []
    for prepared in group:
        card, file = prepared.artifact.card, prepared.artifact.file
        measured = [results[key] for key in baseline]
        weights = whose_weights(card)
        for name, key in zip(prepared.engines, loaded[file], strict=True):
            device = on_its_device(name, scoring.options).device
            keys = (*floats.get(name, ()), key) if card.policy else (key,)
            measured += [replace(results[one], device=device, weights=weights) for one in keys]
        scored.append(Scored(file, with_results(card, measured), tuple(measured)))
    return scored


def _baseline(group: Sequence[_Prepared], scoring: Scoring, world: World) -> dict[str, Engine]:
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


def write_cards(artifacts: Sequence[Scored]) -> list[RunCard]:
    """Add the results of each artifact to its card, which may have changed meanwhile; returns the cards."""
    cards = []
    for one in artifacts:
        cards.append(update(card_path(one.file), one.card, partial(with_results, results=one.measured)))
        log.info("run card: %s", card_path(one.file))
    return cards
