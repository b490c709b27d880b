"""Which files need a checkpoint: their run cards name it by its SHA-256. It is not replaced while they do."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path

_MOST_CARDS, _LARGEST = 4096, 64 << 20
_BELOW = 2  # folders


def dependents(file: Path) -> list[Path]:
    """The artifacts and checkpoints that were made of what now lies at `file`, and are compared with it.

    Looked for beside it, below, above, and in the folders beside its own.
    """
    if not file.is_file():
        return []
    folder, own = file.resolve().parent, card_path(file.resolve())
    sha256 = sha256_of(file)
    cards = islice(_cards(folder), _MOST_CARDS)
    return [made for card in cards if card != own and (made := _made_of(card, sha256))]


def refuse_to_replace(file: Path, content: bytes | memoryview | None = None) -> None:
    """UsageError where something needs what lies at `file`, and it is not the `content` that is to be written."""
    if content is not None and file.is_file() and file.stat().st_size == len(content) and file.read_bytes() == content:
        return
    if needed := dependents(file):
        raise UsageError(
            f"{file}: {listed(map(str, needed), 2)} {'was' if len(needed) == 1 else 'were'} made of what lies there, "
            "and would be compared with another: give another name or folder"
        )


def _cards(folder: Path) -> Iterator[Path]:
    places = [folder, *(below for depth in range(1, _BELOW + 1) for below in _folders(folder, depth))]
    if folder.parent != folder:
        places += [folder.parent, *(beside for beside in _folders(folder.parent, 1) if beside != folder)]
    for place in places:
        yield from sorted(path for path in _entries(place) if path.suffix == ".json" and path.is_file())


def _folders(folder: Path, depth: int) -> list[Path]:
    found = [path for path in _entries(folder) if path.is_dir() and not path.is_symlink()]
    return sorted(found) if depth == 1 else [each for path in sorted(found) for each in _folders(path, depth - 1)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [Path(entry) for entry in islice(os.scandir(folder), _MOST_CARDS)]
    except OSError:  # not ours to read
        return []


def _made_of(path: Path, sha256: str) -> Path | None:
    """The file of a run card, if that names the hash as what it is compared with."""
    try:
        if path.stat().st_size > _LARGEST or sha256.encode() not in path.read_bytes():
            return None
        card = RunCard.read(path)
    except (OSError, SwinQuantError):  # some other JSON
        return None
    record = card.artifact or card.checkpoint
    start = card.training["start"] if card.training else None
    of_artifact = (card.checkpoint or card.source) if card.artifact else None
    needs = [of_artifact, start, card.source if card.has_own_weights else None]
    is_needed = any(need and need["sha256"] == sha256 for need in needs)
    return path.with_name(record["file"]) if is_needed and record and path.with_name(record["file"]).is_file() else None
