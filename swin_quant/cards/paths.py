"""Paths in a run card: relative and plain, so that a folder can be moved and tells nothing of the machine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import INDEX

_MOST_UP, _LONGEST_PATH = 4, 255


def portable_path(file: str | os.PathLike[str], folder: Path) -> str | None:
    """The path of `file` from `folder`, both absolute, for a card; None if it would reveal a place on the machine."""
    try:
        if os.path.commonpath([file, folder]) == Path(folder).anchor:
            return None
        path = Path(os.path.relpath(file, folder)).as_posix()
    except ValueError:  # on another drive
        return None
    return path if _is_portable(path) else None


def _is_portable(path: str) -> bool:
    """Whether a path is relative and plain: at most some steps up, then names."""
    parts = path.split("/")
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return len(path) <= _LONGEST_PATH and ups <= _MOST_UP and ups < len(parts) and all(map(is_bare_name, parts[ups:]))


def located(path: str, card: Path) -> str:
    """The absolute path of a file that a `card` names; SwinQuantError unless the card's path is relative and plain."""
    if not _is_portable(path):
        raise SwinQuantError(f"{card}: a file's path must be relative and plain, not {path!r:.80}")
    return os.path.normpath(card.resolve().parent / path)


def with_paths(content: dict[str, Any], change: Callable[[str], str | None]) -> dict[str, Any]:
    """`content`, a card in JSON, with `change` applied to the path of each file; None removes the path."""
    training = content.get("training") or {}
    places = [content.get("source"), content.get("checkpoint"), training.get("start"), training.get("teacher")]
    for record in places:
        if record and "path" in record:
            path = change(record.pop("path"))
            record |= {} if path is None else {"path": path}
    return content


def card_path(checkpoint: str | os.PathLike[str]) -> Path:
    """The path of the card of a checkpoint or artifact: `out/x_calib.pth` -> `out/x_calib.json`.

    Weights in parts have the card that one file with all of them would have.
    """
    path = Path(checkpoint)
    if path.name.endswith(INDEX) and path.is_file():
        path = path.with_name(path.name.removesuffix(INDEX))
    if path.suffix == ".json":
        raise SwinQuantError(f"{path}: a checkpoint cannot be called .json: that is the name of its run card")
    return path.with_suffix(".json")


def is_bare_name(name: str) -> bool:
    """Whether a text is a file name alone: printable, without folders."""
    return 0 < len(name) <= 255 and name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")
