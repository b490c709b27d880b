"""Scoring artifacts: the float checkpoint first, then every artifact on every engine, in one pass per checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swin_quant.backends.artifact import Artifact
from swin_quant.base.distributed import World, this_world
from swin_quant.base.errors import UsageError
from swin_quant.cards.lineage import find_original
from swin_quant.cards.records import Result
from swin_quant.config.outputs import count_classes, need_logits
from swin_quant.config.sides import sides
from swin_quant.data.picture_set import PictureSet
from swin_quant.exported import (
    find_checkpoint,
    list_engine_names,
    load_engines,
    on_its_device,
    prepared_by,
    read_config,
)
from swin_quant.score.baseline import whose_weights
from swin_quant.score.scoring import ModelInputs, score_engines
from swin_quant.verbs.artifact_baselines import PreparedArtifact, Scoring, load_baseline, load_own_floats
from swin_quant.verbs.timing import Latency, compare_latency

_ELSEWHERE = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}  # a card's values name no folder of this machine
Found = tuple[Result, ...] | tuple[Latency, ...]


def score_artifacts(artifacts: Sequence[Artifact], scoring: Scoring) -> list[Found]:
    """The results of each artifact, its baseline's first; where engines are timed alone, the latencies of all artifacts
    of a checkpoint, with the first of these. Nothing is written.

    Artifacts of one checkpoint and preprocessing are scored in one pass with one float baseline. One whose checkpoint
    is not found is scored without a baseline: no delta then, and a warning. Everything that can be refused (an engine
    that is not installed, a checkpoint of another hash) is refused before a picture is read.
    """
    groups: dict[tuple[Any, ...], list[PreparedArtifact]] = {}
    engines = [list_engine_names(artifact, scoring.engines) for artifact in artifacts]
    for artifact, names in zip(artifacts, engines, strict=True):
        cfg = read_config(artifact, _ELSEWHERE)
        if scoring.timed is None:
            need_logits(cfg.MODEL.OUTPUT_KIND, "accuracy")
        elif artifact.card.wrapped and "inputs" in artifact.card.wrapped:
            raise UsageError(f"{artifact.file}: takes several inputs: time `sq.artifact(FILE).load()` in your own loop")
        checkpoint = find_checkpoint(artifact, scoring.checkpoint)
        prepared = PreparedArtifact(artifact, names, cfg, prepared_by(artifact).preprocess, checkpoint)
        if scoring.original:
            find_original(artifact.card, prepared.folders, scoring.original)  # refuse before anything is scored
        groups.setdefault(prepared.group, []).append(prepared)
    scored: dict[Path, Found] = {}
    for group in groups.values():
        scored |= _score_group(group, scoring, this_world())
    return [scored[artifact.file] for artifact in artifacts]


def _score_group(group: Sequence[PreparedArtifact], scoring: Scoring, world: World) -> dict[Path, Found]:
    first, cfg = group[0], group[0].cfg
    loaded = {p.artifact.file: load_engines(p.artifact, p.engines, scoring.options) for p in group}
    with TemporaryDirectory(prefix="swin-quant-float-") as folder:
        own = load_own_floats(group, scoring, world, Path(folder))
        half = "none" if own and scoring.half == "auto" else scoring.half
        baseline = load_baseline(group, replace(scoring, half=half), world)
        floats = {name: {f"{one.label} on {name}": one for one in some} for name, some in own.items()}
        engines = baseline | {key: one for some in floats.values() for key, one in some.items()}
        engines |= {key: engine for some in loaded.values() for key, engine in some.items()}
        if scoring.timed is not None:
            wrapped = first.artifact.card.wrapped
            shape = tuple(wrapped["shape"]) if wrapped else (3, *sides(cfg.DATA.IMG_SIZE))
            latencies = compare_latency(engines, scoring.timed, shape)
            return {p.artifact.file: latencies if p is first else () for p in group}
        pictures = scoring.pictures
        if isinstance(pictures, PictureSet):
            pictures = pictures.settled(cfg)
        by = ModelInputs(prepared_by(first.artifact), count_classes(cfg), first.artifact.card.class_names)
        results = score_engines(engines, pictures, by, world)
    scored: dict[Path, Found] = {}
    for prepared in group:
        card, file = prepared.artifact.card, prepared.artifact.file
        measured, weights = [results[key] for key in baseline], whose_weights(card)
        for name, key in zip(prepared.engines, loaded[file], strict=True):
            device = on_its_device(name, scoring.options).device
            keys = (*floats.get(name, ()), key) if card.policy else (key,)
            measured += [replace(results[one], device=device, weights=weights) for one in keys]
        scored[file] = tuple(measured)
    return scored
