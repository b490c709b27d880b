"""A calibrated model and what is written of it: checkpoint, statistics and card."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import card_of
from swin_quant.cards.records import (
    CheckpointRecord,
    RangesRecord,
    TrainingRecord,
)
from swin_quant.checkpoint import save_calibrated
from swin_quant.quant.calibration import Calibration
from swin_quant.quant.spread import MOST
from swin_quant.quant.statistics_file import SUFFIX, statistics_bytes


@dataclass(frozen=True)
class Calibrated:
    """A calibrated model with its policy applied, where it was saved, and its card."""

    model: nn.Module
    checkpoint: Path
    card: RunCard


def finish(model: nn.Module, path: Path, card: RunCard, calibration: Calibration, world: World) -> Calibrated:
    """Write checkpoint, statistics and card, in this order."""
    peaks = calibration.peaks if calibration.pictures <= MOST else {}
    counted = statistics_bytes(calibration.statistics, peaks) if calibration.statistics else None
    kept = path.with_suffix(SUFFIX)
    record = CheckpointRecord(file=kept.name, sha256=hashlib.sha256(counted).hexdigest()) if counted else None
    if card.calibration:
        card = replace(card, calibration={**card.calibration, "statistics": record})
    if world.is_main:
        card = save_with_card(model, path, card, others={kept: counted} if counted else {})
        if counted:
            log.info("statistics: %s", kept)
        else:
            kept.unlink(missing_ok=True)  # of an earlier calibration, whose checkpoint is gone, too
    return Calibrated(model, path, card)


def save_with_card(
    model: nn.Module, path: Path, card: RunCard, by_channel: bool = False, others: Mapping[Path, bytes] | None = None
) -> RunCard:
    """Write a calibrated checkpoint and the `others`, then the card that holds its hash; returns that card."""
    save_calibrated(model, path, by_channel)
    for other, content in (others or {}).items():
        atomic_write_bytes(other, content)
    card = replace(card, checkpoint={"file": path.name, "sha256": sha256_of(path)})
    card.write(path.with_suffix(".json"))
    for what, file in (("calibrated checkpoint", path), ("run card", path.with_suffix(".json"))):
        log.info("%s: %s", what, file)
    return card


def made_before(checkpoint: str | None, calibrated: bool) -> RunCard | None:
    """The card of a checkpoint that is calibrated already, or has weights of its own: whatever is made from it came
    from the same original, through the same passes. `calibrated`: its weights hold ranges."""
    if checkpoint is None:
        return None
    try:
        card = card_of(checkpoint)
    except SwinQuantError:
        if calibrated:  # it may be QAT's
            raise
        return None  # some other JSON beside a float checkpoint
    if card is None or card.has_own_weights:
        return card
    return card if card.calibration and card.source else None  # random weights that were calibrated have no source


def calibrated_again(before: RunCard | None) -> TrainingRecord | None:
    """How the weights were trained, for the card of new ranges; None where they were not (`made_before`)."""
    as_calibrated = RangesRecord(weights=None, activations=None)
    return {**before.training, "ranges": as_calibrated} if before and before.training else None
