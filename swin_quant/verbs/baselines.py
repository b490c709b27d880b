"""The float model that a model is compared with, found for one in memory or for a checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord, SourceRecord
from swin_quant.loading import Subject
from swin_quant.model import Model
from swin_quant.quant.policy import Policy
from swin_quant.score.baseline import (
    Baseline,
    find_baseline,
    load_original,
    missing,
    unnamed_baseline,
    whose_weights,
)


def baseline_of(model: Model, policies: Sequence[Policy], world: World, original: str | Path | None) -> Baseline | None:
    """The baseline of a model in memory; None where it is its own.

    `original`: the float checkpoint that its weights came from, which is looked for by the run card if it is not named.
    """
    if not model.card.has_own_weights and original is None:
        return None
    if original is None and model.original is not None and (whose := whose_weights(model.card)):
        return Baseline(model.original, whose=whose)
    if original is None and not model.card.config:
        log.warning("%s", missing(model.card))
        return unnamed_baseline(model.card)
    folders = [model.file.resolve().parent] if model.file else []
    return find_baseline(model.card, folders, model.config, policies, world, str(original) if original else None)


def card_and_baseline(
    subject: Subject, cfg: CfgNode, world: World = World(), original: str | None = None
) -> tuple[RunCard, Baseline | None]:
    """The card of a loaded checkpoint, and its baseline: the float checkpoint `original`, or the one that is found.

    A calibrated checkpoint without run card came from `original`: if their weights differ, it was
    trained since.
    """
    if original and not subject.policies:
        raise UsageError(f"‹float› {original}: what is scored is a float checkpoint itself: leave it out")
    if subject.card_file:
        folders = [subject.card_file.resolve().parent]
        return subject.card, find_baseline(subject.card, folders, cfg, subject.policies, world, original)
    if original is None:
        if subject.policies:
            log.info("no run card: taken as not trained since it was float; if it was (QAT), give ‹float› FILE")
        return subject.card, None
    float_model, source = load_original(cfg, original, world)
    card = replace(subject.card, source=source.record(), checkpoint=_file_record(subject.card.source))
    weights, own = dict(float_model.named_parameters()), dict(subject.model.named_parameters())
    same = own.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in own.items())
    return card, None if same else Baseline(float_model)


def _file_record(source: SourceRecord | None) -> CheckpointRecord | None:
    if source is None:
        return None
    record: CheckpointRecord = {"file": source["file"], "sha256": source["sha256"]}
    return {**record, "path": source["path"]} if "path" in source else record
