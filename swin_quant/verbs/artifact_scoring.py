"""Scoring artifacts: the float models first, then every artifact on every engine, in one pass per checkpoint."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from yacs.config import CfgNode

from swin_quant import exported
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import engine_named
from swin_quant.base.distributed import World, this_world
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import compute_sha256
from swin_quant.base.progress import log
from swin_quant.cards.lineage import find_original
from swin_quant.cards.records import Result
from swin_quant.config.outputs import LOGITS, count_classes, say
from swin_quant.config.sides import sides
from swin_quant.data.picture_set import PictureSet
from swin_quant.loading import giving, load_for_scoring, open_baseline
from swin_quant.model import Model
from swin_quant.quant.policy import Policy, load_policy
from swin_quant.score import baseline as baselines
from swin_quant.score.engine import HALF_TYPES, Engine, half_type
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import BATCH
from swin_quant.score.scoring import ModelInputs, score_engines
from swin_quant.verbs.export_target import ExportTarget
from swin_quant.verbs.timing import Latency, compare_latency

Found = tuple[Result, ...] | tuple[Latency, ...]


@dataclass(frozen=True)
class Scoring:
    """How artifacts are scored: on `engines` (None: all installed), beside the half-precision baseline `half`.

    `checkpoint`, `original`: the exported one, and the float one that it came from, where they are not found.
    `own_float` scores the float form of the same weights on the engine, too, since int8 replaces it, in place of
    torch's half precision if `half` is auto. `origin`: the model of a wrapped module, which no file can build.
    `timed`: the size of a batch of noise that is timed in place of scoring pictures.
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


class PreparedArtifact(NamedTuple):
    """An artifact with what it is scored by. `folders` are searched for the float checkpoint."""

    artifact: Artifact
    engines: list[str]
    cfg: CfgNode
    checkpoint: Path | None
    folders: list[Path]


def score_artifacts(artifacts: Sequence[Artifact], scoring: Scoring) -> list[Found]:
    """The results of each artifact, its baseline's first; where engines are timed alone, the latencies of all artifacts
    of a checkpoint, with the first of these. Nothing is written. Artifacts of one checkpoint and preprocessing are
    scored in one pass with one float baseline; without its checkpoint one has no delta, and a warning says so. What can
    be refused is refused before a picture is read."""
    groups: dict[tuple[Any, ...], list[PreparedArtifact]] = {}
    engines = [exported.list_engine_names(artifact, scoring.engines) for artifact in artifacts]
    for artifact, names in zip(artifacts, engines, strict=True):
        cfg = exported.read_config(
            artifact, {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}
        )  # no folder of this machine
        if scoring.timed is None and cfg.MODEL.OUTPUT_KIND != LOGITS:
            given = say(cfg.MODEL.OUTPUT_KIND)
            raise UsageError(f"{artifact.file}: gives {given}, no logits: use `verify`, or ‹no_accuracy› to time it")
        if scoring.timed is not None and artifact.card.wrapped and "inputs" in artifact.card.wrapped:
            raise UsageError(f"{artifact.file}: takes several inputs: time `sq.artifact(FILE).load()` in your own loop")
        checkpoint = exported.find_checkpoint(artifact, scoring.checkpoint)
        folders = [*exported.list_search_folders(artifact), *([checkpoint.parent] if checkpoint else [])]
        if scoring.original:
            find_original(artifact.card, folders, scoring.original)  # refuse before anything is scored
        weights = compute_sha256(checkpoint) if checkpoint else artifact.file
        prepared = PreparedArtifact(artifact, names, cfg, checkpoint, folders)
        groups.setdefault((weights, exported.prepared_by(artifact).preprocess), []).append(prepared)
    scored: dict[Path, Found] = {}
    for group in groups.values():
        scored |= _score_group(group, scoring, this_world())
    return [scored[artifact.file] for artifact in artifacts]


def _score_group(group: Sequence[PreparedArtifact], scoring: Scoring, world: World) -> dict[Path, Found]:
    first, cfg = group[0], group[0].cfg
    loaded = {one.artifact.file: exported.load_engines(one.artifact, one.engines, scoring.options) for one in group}
    pictures, fixed = scoring.pictures, scoring.timed
    if isinstance(pictures, PictureSet):
        pictures = pictures.settled(cfg)
        limits = [engine.max_batch for engines in loaded.values() for engine in engines.values() if engine.max_batch]
        batch = min([pictures.batch or BATCH, *limits])
        if fixed is None and scoring.own_float and pictures.has(batch * world.size):  # or it would be filled up
            fixed = batch
    with TemporaryDirectory(prefix="swin-quant-float-") as folder:
        own = _load_own_floats(group, scoring, world, Path(folder), fixed)
        half = half_type("none" if own and scoring.half == "auto" else scoring.half, world.device)
        baseline = _load_baseline(group, scoring, half, world)
        floats = {name: {f"{one.label} on {name}": one for one in some} for name, some in own.items()}
        engines = dict(baseline)
        engines.update(one for some in (*floats.values(), *loaded.values()) for one in some.items())
        if scoring.timed is not None:
            wrapped = first.artifact.card.wrapped
            shape = tuple(wrapped["shape"]) if wrapped else (3, *sides(cfg.DATA.IMG_SIZE))
            latencies = compare_latency(engines, scoring.timed, shape)
            return {one.artifact.file: latencies if one is first else () for one in group}
        by = ModelInputs(exported.prepared_by(first.artifact), count_classes(cfg), first.artifact.card.class_names)
        results = score_engines(engines, pictures, by, world)
    scored: dict[Path, Found] = {}
    for one in group:
        card, file = one.artifact.card, one.artifact.file
        measured, weights = [results[key] for key in baseline], baselines.whose_weights(card)
        for name, key in zip(one.engines, loaded[file], strict=True):
            device = exported.on_its_device(name, scoring.options).device
            keys = (*floats.get(name, ()), key) if card.policy else (key,)
            measured += [replace(results[each], device=device, weights=weights) for each in keys]
        scored[file] = tuple(measured)
    return scored


def _load_baseline(
    group: Sequence[PreparedArtifact], scoring: Scoring, half: str | None, world: World
) -> dict[str, Engine]:
    """float32 first, then half, then the simulation if that is asked for; nothing where no baseline is found."""
    first, card = group[0], group[0].artifact.card
    model, policies, why = None, list[Policy](), exported.NEEDS_MODULE
    baseline: baselines.Baseline | None = None
    if card.wrapped is None or scoring.origin is not None:
        why = exported.no_checkpoint(first.artifact)
        if first.checkpoint is not None or scoring.origin:
            quantized = next((one for one in group if one.artifact.card.policy), first)
            model, policies = exported.load_origin(
                quantized.artifact, first.cfg, first.checkpoint, world, scoring.origin
            )
        policies = policies if scoring.fake_quant else []
        if scoring.origin and card.wrapped:
            baseline = open_baseline(scoring.origin, policies, world)
        else:
            baseline = baselines.find_baseline(card, first.folders, first.cfg, policies, world, scoring.original)
        if model and (policies or baseline is None):
            return baselines.engines_beside(model.module, world.device, half, policies, baseline)
        if baseline is None and (file := find_original(card, first.folders, scoring.original)):
            baseline = baselines.Baseline(baselines.load_original(first.cfg, file, world)[0])
    if baseline is None:
        log.warning("%s: no float model stands beside it: %s", first.artifact.file, why)
        return {}
    return baselines.load_original_engines(baseline, world.device, half)


def _load_own_floats(
    group: Sequence[PreparedArtifact], scoring: Scoring, world: World, folder: Path, batch: int | None
) -> dict[str, list[Engine]]:
    """Engine name -> the float forms of the same weights on it, where none is scored: in the half type that the engine
    would choose for float, or else in float32; in both if a type is asked for, or engines are only timed.

    `batch`: that of all batches but the last; one that is fixed is exported in two thirds of the time."""
    first, options = group[0], scoring.options
    is_built = scoring.origin is not None or first.artifact.card.wrapped is None
    is_wanted = scoring.own_float and any(one.artifact.card.policy for one in group)
    if first.checkpoint is None or not is_built or not is_wanted:
        return {}
    found: dict[str, list[Engine]] = {}
    given = {name for one in group if not one.artifact.card.policy for name in one.engines}
    for name in dict.fromkeys(name for one in group for name in one.engines if name not in given):
        backend, device = engine_named(name), engine_named(name).home or world.device.type
        if not backend.runs_its_export or backend.only_quantized or not backend.is_fast_on(device):
            continue
        try:
            fixed = {"batch": batch} if backend.graph_per_shape else {}
            target, plain = ExportTarget.parse(name, "float", fixed), load_policy("float")
            if scoring.origin is None:
                model, _ = load_for_scoring(first.cfg, first.checkpoint, [plain])
                module, card = model.network, giving(model.card, first.cfg)
            else:  # a wrapped module, which no file can build
                module, card = deepcopy(scoring.origin.network).cpu().eval(), scoring.origin.card
            artifact = target.write(module, card, first.checkpoint, folder / name, plain)
            offered = function(backend.float_types)() if backend.float_types else []
            half = [kind for kind in HALF_TYPES if kind in offered and kind == half_type("auto", world.device)]
            is_slow = half and not options.float_type and scoring.timed is None  # float32, to score
            for kind in dict.fromkeys([*([] if is_slow else [options.float_type]), *half]):
                loaded = exported.load_engines(artifact, [name], replace(options, float_type=kind))
                found[name] = [*found.get(name, []), *loaded.values()]
        except (SwinQuantError, RuntimeError) as error:  # by exporters and engines
            log.warning("%s: its own float is not scored: %s", name, one_line(str(error)))
    return found
