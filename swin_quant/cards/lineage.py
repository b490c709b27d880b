"""Find the files that a model came from, and those that came from it; only their SHA-256, in run cards, identifies
them.

Quantized figures are compared with the float checkpoint that the user had. Calibration keeps its weights, QAT and some
passes do not: then the original is searched, or another file that is known to hold its weights. While the card of a
file names a checkpoint, the checkpoint is not replaced.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import compute_sha256, require_file
from swin_quant.cards.card import RunCard, verify_checkpoint
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import RangesRecord, TrainingRecord, sha256_in

_MOST_STARTS = 32  # QAT after QAT; a card can name itself
_MOST_CARDS, _LARGEST = 4096, 64 << 20


@dataclass(frozen=True)
class Start:
    """A checkpoint that QAT started from, and its card if it has one."""

    file: Path
    card: RunCard | None


def find_card(checkpoint: str | Path, sha256: Callable[[], str] | None = None) -> RunCard | None:
    """The run card beside `checkpoint`, if there is one; SwinQuantError if it is another's, or there is neither.

    `sha256`: gives the hash of the checkpoint where it is known already.
    """
    require_file(checkpoint, "checkpoint")
    path = card_path(checkpoint)
    if not path.exists():
        return None
    card = RunCard.read(path)
    verify_checkpoint(card, checkpoint, sha256)
    return card


def find_recorded_file(record: Mapping[str, Any] | None, folders: Sequence[Path]) -> Path | None:
    """The file of a card's record, at its recorded place or by name in one of `folders`; None if it is not there."""
    if record is None:
        return None
    places = [*([Path(record["path"])] if "path" in record else []), *(folder / record["file"] for folder in folders)]
    for path in places:
        with contextlib.suppress(SwinQuantError):  # not ours to read: it may be found elsewhere
            if path.is_file() and compute_sha256(path) == record["sha256"]:
                return path
    return None


def qat_starts(card: RunCard, folders: Sequence[Path]) -> Iterator[Start]:
    """The chain of checkpoints that QAT started from, back to the calibrated one, as far as files are found."""
    for _ in range(_MOST_STARTS):
        file = find_recorded_file(card.start, folders) if card.is_qat else None
        if file is None:
            return
        before = find_card(file)
        yield Start(file, before)
        if before is None or sha256_in(before.source) != sha256_in(card.source):
            return
        card, folders = before, [file.parent]


def find_qat_start(card: RunCard, folders: Sequence[Path]) -> Start | None:
    """The calibrated checkpoint of the card's original that QAT began with."""
    found = list(qat_starts(card, folders))
    return found[-1] if found and _holds_original(found[-1], card) else None


def find_original(card: RunCard, folders: Sequence[Path], float_file: str | Path | None = None) -> Path | None:
    """A file with the weights of the card's original: `float_file`, the source itself, or the start of its QAT.

    SwinQuantError if `float_file` is another one; None if none is found.
    """
    if float_file is not None:
        if card.source is None:
            raise SwinQuantError(f"‹float› {float_file}: the run card {card.name} names no original to compare it with")
        sha256 = compute_sha256(float_file)
        holds = sha256 == sha256_in(card.source)
        if not holds and sha256 == sha256_in(card.start):
            holds = _holds_original(Start(Path(float_file), find_card(float_file)), card)
        if not holds:
            raise SwinQuantError(
                f"‹float› {float_file}: is not the float checkpoint that the run began with, {card.source['file']}: "
                f"its SHA-256 is {sha256[:12]}..., the run card has {card.source['sha256'][:12]}..."
            )
        return Path(float_file)
    chain = list(qat_starts(card, folders))
    places = [*folders, *(start.file.parent for start in chain)]
    for each in [card, *(start.card for start in chain if start.card)]:
        teacher = each.training["teacher"] if each.training else None
        for record in (each.source, teacher):
            if record and record["sha256"] == sha256_in(card.source) and (file := find_recorded_file(record, places)):
                return file
    return chain[-1].file if chain and _holds_original(chain[-1], card) else None


def _holds_original(start: Start, card: RunCard) -> bool:
    """Whether a start has the original's weights: it is that file, or was only calibrated."""
    if start.card is None:
        return compute_sha256(start.file) == sha256_in(card.source)
    return not start.card.has_own_weights and sha256_in(start.card.source) == sha256_in(card.source)


def calibrated_again(before: RunCard | None) -> TrainingRecord | None:
    """The training record for a card whose ranges are found anew; None if the weights were not trained."""
    as_calibrated = RangesRecord(weights=None, activations=None)
    return {**before.training, "ranges": as_calibrated} if before and before.training else None


def dependents(file: Path) -> list[Path]:
    """The artifacts and checkpoints that were made from `file` and are compared with it.

    Searched are the folders beside it, below, above, and beside its own.
    """
    if not file.is_file():
        return []
    resolved, sha256 = file.resolve(), compute_sha256(file)
    folder, above = resolved.parent, resolved.parent.parent
    places = [folder.glob("*.json"), folder.glob("*/*.json"), folder.glob("*/*/*.json")]
    places += [above.glob("*.json"), above.glob("*/*.json")] if above != folder else []
    found = (card for place in places for card in sorted(islice(place, _MOST_CARDS)) if card.is_file())
    cards = dict.fromkeys(card.resolve() for card in found)  # a link to a folder shows its cards again
    cards.pop(card_path(resolved), None)
    files = [made for card in cards if (made := _find_derived_file(card, resolved, sha256))]
    return [Path(os.path.normpath(file.parent / os.path.relpath(made, resolved.parent))) for made in files]


def refuse_to_replace(file: Path, content: bytes | memoryview | None = None) -> None:
    """UsageError if another file needs `file`, unless the new `content` is the same."""
    if content is not None and file.is_file() and file.stat().st_size == len(content) and file.read_bytes() == content:
        return
    if needed := dependents(file):
        raise UsageError(
            f"{file}: {listed(map(str, needed), 2)} {'was' if len(needed) == 1 else 'were'} made of what lies there, "
            "and would be compared with another: give another name or folder"
        )


def _find_derived_file(path: Path, file: Path, sha256: str) -> Path | None:
    """The file of the run card at `path`, if the card compares it with `file`: it names that hash, and finds `file`."""
    try:
        if path.stat().st_size > _LARGEST or sha256.encode() not in path.read_bytes():
            return None
        card = RunCard.read(path)
    except (OSError, SwinQuantError):  # some other JSON
        return None
    exported = (card.checkpoint or card.source) if card.artifact else None
    needs = [exported, card.start, card.source if card.has_own_weights else None]
    found = [
        find_recorded_file(need, [path.parent, path.parent.parent])
        for need in needs
        if need and need["sha256"] == sha256
    ]
    made = card.artifact or card.checkpoint
    if made is None or not path.with_name(made["file"]).is_file():
        return None
    return path.with_name(made["file"]) if any(one and one.samefile(file) for one in found) else None
