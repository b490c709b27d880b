"""A request for a split of the data at a place, and the files there that belong to it."""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from swin_quant.base.errors import UsageError

SPLIT = "{split}"  # stands for the split in a path or pattern
_MAX_FILES = 100_000  # for one pattern with braces
_BRACES = re.compile(r"(.*?)\{(?:([0-9]{1,9})\.\.([0-9]{1,9})|([^{}]*,[^{}]*))\}(.*)")


@dataclass(frozen=True)
class DataRequest:
    """A split of the data at `place`, for a model with `classes` classes; None: labels are not needed.

    `prefix`: the kind, if the user named it; otherwise it is detected.
    """

    place: str
    split: str
    classes: int | None = None
    prefix: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the split, if `place` is a folder of splits."""
        return Path(self.place, self.split)

    @property
    def has_splits(self) -> bool:
        """Whether another split means other data: a single file is the same data under any split."""
        return SPLIT in self.place or os.path.isdir(self.place)


def list_files(request: DataRequest, ending: str, inside: str = "") -> list[Path]:
    """The files with this `ending` at a place: the place itself, or the files of its pattern (`{0..9}`, `{a,b}`, `*`).

    For a folder: the files that match `inside`, or have the ending, in its folder `<split>`, else `<split>.csv`, else
    `<split>-*.csv`, there or in its folder `data` (.csv stands for `ending`). None if the folder `<split>` holds
    folders of classes.
    """
    if not os.path.isdir(request.place):
        place = request.place.replace(SPLIT, request.split)
        every = list(islice(_braces(place), _MAX_FILES + 1)) if place.endswith(ending) else []
        if len(every) > _MAX_FILES:
            raise UsageError(f"{place}: stands for more than {_MAX_FILES:,} files")
        # A missing file stays, for opening it to fail
        return [Path(file) for each in every for file in (sorted(glob.glob(each)) if glob.has_magic(each) else [each])]
    root, split = Path(request.place), glob.escape(request.split)
    if request.folder.is_dir():
        if subfolders(request.folder):
            return []
        if held := sorted(request.folder.glob(inside or f"*{ending}")):
            return held
    whole = root / f"{request.split}{ending}"
    parts = (sorted(folder.glob(f"{split}[-_]*{ending}")) for folder in (root, root / "data"))
    return [whole] if whole.is_file() else next(filter(None, parts), [])


def subfolders(folder: Path) -> list[str]:
    """The folders in a folder, sorted, without hidden ones; none if it cannot be listed."""
    try:
        return sorted(item.name for item in os.scandir(folder) if item.is_dir() and not item.name.startswith("."))
    except OSError:
        return []


def _braces(place: str) -> Iterator[str]:
    """The expansions of `{0000..0009}` and `{a,b}`, in order, as in webdataset's names of shards."""
    found = _BRACES.fullmatch(place)
    if found is None:
        yield place
        return
    before, first, last, words, after = found.groups()
    if words is None and int(last) - int(first) >= _MAX_FILES:
        count = int(last) - int(first) + 1
        raise UsageError(f"{place}: {{{first}..{last}}} stands for {count:,} files: at most {_MAX_FILES:,}")
    numbers = () if words else (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    for choice in words.split(",") if words else numbers:
        yield from (f"{before}{choice}{rest}" for rest in _braces(after))
