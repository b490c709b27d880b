"""Pictures that a user names one by one: files, folders and patterns."""

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from swin_quant.base.errors import UsageError
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import is_picture, printable


class NamedPictures(FolderPictures):
    """The pictures at `places`, in that order, each once; a folder stands for its pictures, in all its levels, sorted.

    A file that was named is taken whatever its extension, and one that is missing is an unreadable picture. Labels
    are -1.

    Raises:
        UsageError: a folder or a pattern (`*`, `?`, `[`) without a picture, or no place at all.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]) -> None:
        self.folder = Path()
        self._files = list(dict.fromkeys(file for place in places for file in _expanded(str(place))))
        if not self._files:
            raise UsageError("no picture: name files, folders or patterns")
        self.names = [printable(file) for file in self._files]
        self.labels = [-1] * len(self._files)
        self.class_names = []


def _expanded(place: str) -> Iterator[str]:
    if os.path.isdir(place):
        found = sorted(_below(place))
    elif os.path.exists(place) or not glob.has_magic(place):
        found = [place]
    else:
        found = sorted(match for match in glob.glob(place, recursive=True) if is_picture(match))
    if not found:
        raise UsageError(f"{place}: no picture there")
    yield from found


def _below(folder: str) -> Iterator[str]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(path, name) for name in files if is_picture(name) and not name.startswith("."))
