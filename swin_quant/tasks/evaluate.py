"""Scoring a model: float32 first, then half precision and the quantized model, on the same pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.base.shards import Sharding
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import CheckpointRecord, SourceRecord
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import Subject
from swin_quant.quant.eval_mode import eval_mode
from swin_quant.quant.policy import Policy
from swin_quant.score.baseline import Baseline, engines_beside, find_baseline, load_original
from swin_quant.score.engine import half_type
from swin_quant.score.saved_predictions import PredictionFolder
from swin_quant.score.scoring import score_engines


def score_model(
    model: nn.Module,
    cfg: CfgNode,
    card: RunCard,
    policies: Sequence[Policy] = (),
    world: World = World(),  # noqa: B008
    split: str = "val",
    half: str = "auto",
    max_unreadable: float = 0.01,
    baseline: Baseline | None = None,
    answers: Sharding | None = None,
) -> RunCard:
    """The card with a result for float32, half precision and each policy, on `split` of the config's data path.

    Preprocessing is the card's; the model's nodes must be calibrated for the policies. `baseline` is what a model that
    QAT trained is compared with (`find_baseline`). Every rank scores its share; all return the same card. `answers`:
    where those to each picture are kept, so that a run which is cut off goes on.
    """
    preprocess = Preprocess.from_dict(card.preprocess)
    if preprocess != Preprocess.from_config(cfg):
        log.warning("preprocessing is that of the run card, which differs from the config: %s", preprocess)
    engines = engines_beside(model, world.device, half_type(half, world.device), policies, baseline)
    whose = {"source": sha256_in(card.source), "checkpoint": sha256_in(card.checkpoint)}
    keeping = PredictionFolder(answers, whose) if answers else None
    with eval_mode(model):
        results = score_engines(engines, cfg, preprocess, world, split, max_unreadable, keeping, card.class_names)
    for result in results.values():
        card = card.with_result(result)
    return card


def compared(
    subject: Subject,
    cfg: CfgNode,
    world: World = World(),  # noqa: B008
    given: str | None = None,
) -> tuple[RunCard, Baseline | None]:
    """The subject's card, and what the subject is compared with: `given`, or what is found.

    A calibrated checkpoint without run card is taken at the user's word: `given` is what it came from, and if their
    weights differ it was trained since.
    """
    if given and not subject.policies:
        raise UsageError(f"‹float› {given}: what is scored is a float checkpoint itself: leave it out")
    if subject.card_file:
        folders = [subject.card_file.resolve().parent]
        return subject.card, find_baseline(subject.card, folders, cfg, subject.policies, world, given)
    if given is None:
        if subject.policies:
            log.info("no run card: taken as not trained since it was float; if it was (QAT), give ‹float› FILE")
        return subject.card, None
    original, source = load_original(cfg, given, world)
    card = replace(subject.card, source=source.record(), checkpoint=_file_record(subject.card.source))
    weights, own = dict(original.named_parameters()), dict(subject.model.named_parameters())
    same = own.keys() == weights.keys() and all(torch.equal(value, weights[name]) for name, value in own.items())
    return card, None if same else Baseline(original)


def _file_record(source: SourceRecord | None) -> CheckpointRecord | None:
    if source is None:
        return None
    record = CheckpointRecord(file=source["file"], sha256=source["sha256"])
    return {**record, "path": source["path"]} if "path" in source else record


def sha256_in(record: Mapping[str, Any] | None) -> str | None:
    """The hash in a record of a card, if there is one."""
    return record["sha256"] if record else None
