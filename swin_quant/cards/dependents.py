"""Find the files whose run cards name a checkpoint's SHA-256: while they exist, it is not replaced."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import sha256_of
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find
from swin_quant.cards.paths import card_path

_MOST_CARDS, _LARGEST = 4096, 64 << 20
_BELOW = 2  # folders


def dependents(file: Path) -> list[Path]:
    """The artifacts and checkpoints that were made from `file` and are compared with it.

    Searched are the folders beside it, below, above, and beside its own.
    """
    if not file.is_file():
        return []
    resolved, sha256 = file.resolve(), sha256_of(file)
    cards = (card for card in islice(_cards(resolved.parent), _MOST_CARDS) if card != card_path(resolved))
    found = [made for card in cards if (made := _made_of(card, resolved, sha256))]
    return [Path(os.path.normpath(file.parent / os.path.relpath(made, resolved.parent))) for made in found]


def refuse_to_replace(file: Path, content: bytes | memoryview | None = None) -> None:
    """UsageError if another file needs `file`, unless the new `content` is the same."""
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


def _made_of(path: Path, file: Path, sha256: str) -> Path | None:
    """The file of the run card at `path`, if the card compares it with `file`: it names that hash, and finds `file`."""
    try:
        if path.stat().st_size > _LARGEST or sha256.encode() not in path.read_bytes():
            return None
        card = RunCard.read(path)
    except (OSError, SwinQuantError):  # some other JSON
        return None
    of_artifact = (card.checkpoint or card.source) if card.artifact else None
    start = card.training["start"] if card.training else None
    needs = [of_artifact, start, card.source if card.has_own_weights else None]
    found = [find(need, [path.parent, path.parent.parent]) for need in needs if need and need["sha256"] == sha256]
    made = card.artifact or card.checkpoint
    if made is None or not path.with_name(made["file"]).is_file():
        return None
    return path.with_name(made["file"]) if any(one and one.samefile(file) for one in found) else None
