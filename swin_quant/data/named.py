"""Pictures that a user names one by one: files, folders and patterns."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from swin_quant.base.errors import UsageError
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import is_picture, printable
from swin_quant.data.walk import Walk


class NamedPictures(FolderPictures):
    """The pictures at `places`, in that order, each once; a folder stands for all pictures below it, sorted.

    A named file is taken whatever its extension; if it is missing, it is an unreadable picture. Labels are -1.

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


def _expanded(place: str) -> list[str]:
    walk = Walk([place])
    if os.path.isdir(place):
        found = sorted(walk.pictures(place))
    elif os.path.exists(place) or not glob.has_magic(place):
        found = [place]
    else:
        matches = sorted(match for match in glob.glob(place, recursive=True) if not os.path.isdir(match))
        walk.leave_out(match for match in matches if not is_picture(match))
        found = [match for match in matches if is_picture(match)]
    if not found:
        raise UsageError("; ".join(filter(None, (f"{place}: no picture there", walk.left_out(place)))))
    walk.tell(place)
    return found
