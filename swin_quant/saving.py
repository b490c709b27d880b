"""Write a calibrated model: checkpoint, statistics and run card, without replacing a file that another needs."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from torch import nn

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import atomic_write_bytes, sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import dependents, refuse_to_replace
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import (
    CheckpointRecord,
)
from swin_quant.checkpoint import calibrated_bytes
from swin_quant.quant.calibration import Calibration
from swin_quant.quant.range_uncertainty import MOST
from swin_quant.quant.statistics_file import SUFFIX, statistics_bytes

_MOST_PLACES = 1000


def finish(model: nn.Module, path: Path, card: RunCard, calibration: Calibration, world: World) -> RunCard:
    """Write checkpoint, statistics and card, in this order; returns the written card."""
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
            kept.unlink(missing_ok=True)  # an earlier calibration's, whose checkpoint is gone too
    return card


def place_for(folder: Path, model: nn.Module, card: RunCard) -> Path:
    """The file for a calibrated model: see `place_of`."""
    content = calibrated_bytes(model)
    return place_of(folder, card.name, card.policy, lambda file: _holds(file, content, card))


def place_of(
    folder: Path, name: str, policy: Mapping[str, Any] | None, holds: Callable[[Path], bool], tell: bool = True
) -> Path:
    """The file for a calibrated checkpoint: <NAME>_calib.pth, or the file that holds the same checkpoint (`holds`).

    Another checkpoint from which something was made stays: the new file's name then gets the policy's name, and if that
    is taken too, a number.
    """
    usual = folder / f"{name}_calib.pth"
    own = f"{name}_calib_{re.sub('[^A-Za-z0-9.]+', '-', (policy or {}).get('name', '')).strip('-.')[:80] or 'other'}"
    numbered = (folder / f"{own}_{number}.pth" for number in count(2))
    tried = [usual, folder / f"{own}.pth"]
    tried += takewhile(Path.exists, islice(numbered, _MOST_PLACES))
    found = next((place for place in tried if place.is_file() and holds(place)), None)
    free = found or next((place for place in tried if not dependents(place)), folder / f"{own}_{len(tried)}.pth")
    if tell and free != usual and not found:
        log.warning("%s: stays, since %s was made of it: this calibration is %s",
                    usual, listed(map(str, dependents(usual)), 1), free)  # fmt: skip
    return free


def _holds(file: Path, content: bytes | memoryview, card: RunCard) -> bool:
    """Whether a file has that content, calibrated under the same policy."""
    if file.stat().st_size != len(content) or file.read_bytes() != content:
        return False
    try:
        there = RunCard.read(card_path(file))
    except SwinQuantError:
        return True
    return (there.policy or {}).get("rules") == (card.policy or {}).get("rules")


def save_with_card(
    model: nn.Module, path: Path, card: RunCard, by_channel: bool = False, others: Mapping[Path, bytes] | None = None
) -> RunCard:
    """Write a calibrated checkpoint and the `others`, then the card with its hash; returns that card.

    UsageError if something was made of another checkpoint there.
    """
    content = calibrated_bytes(model, by_channel)
    refuse_to_replace(path, content)
    atomic_write_bytes(path, content)
    for other, data in (others or {}).items():
        atomic_write_bytes(other, data)
    card = replace(card, checkpoint={"file": path.name, "sha256": sha256_of(path)})
    card.write(path.with_suffix(".json"))
    for what, file in (("calibrated checkpoint", path), ("run card", path.with_suffix(".json"))):
        log.info("%s: %s", what, file)
    return card
