"""Pictures that a user gives one by one: files, folders and patterns, and pictures in memory."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.data.folder import FolderPictures, Walk
from swin_quant.data.pictures import is_picture, printable


class NamedPictures(FolderPictures):
    """The pictures given, in that order: places on disk, and pictures of PIL.

    A folder stands for all pictures below it, sorted. A named file is taken whatever its extension; if it is missing,
    it is an unreadable picture. Labels are -1. `once`: each file counts once.

    Raises:
        UsageError: a folder or a pattern (`*`, `?`, `[`) without a picture, or nothing at all.
    """

    def __init__(self, given: Iterable[str | os.PathLike[str] | Image.Image], once: bool = True) -> None:
        self.folder = Path()
        self._held: dict[int, Image.Image] = {}
        self._files = []
        for item in given:
            if isinstance(item, Image.Image):
                self._held[len(self._files)] = item
                self._files.append(f"picture {len(self._files)}")
            else:
                self._files += _expanded(os.fspath(item))
        if once and not self._held:
            self._files = list(dict.fromkeys(self._files))
        if not self._files:
            raise UsageError("no picture: name files, folders or patterns")
        self.names = [printable(file) for file in self._files]
        self.labels = [-1] * len(self._files)
        self.class_names = []

    def open(self, index: int) -> bytes | Image.Image:  # type: ignore[override]  # a picture of PIL has no bytes
        return self._held[index] if index in self._held else super().open(index)


def collect_pictures(given: Any) -> NamedPictures | None:
    """The pictures that are `given`: places on disk, pictures of PIL, pixels uint8 [H, W, 3] or [B, H, W, 3], or a list
    of these; None for anything else."""
    found = [_pictures(item) for item in (given if isinstance(given, list | tuple) else [given])]
    if not found or None in found:
        return None
    return NamedPictures([one for part in found if part is not None for one in part], once=False)


def _pictures(item: Any) -> list[str | os.PathLike[str] | Image.Image] | None:
    if isinstance(item, str | os.PathLike | Image.Image):
        return [item]
    if isinstance(item, Tensor | np.ndarray) and str(item.dtype).endswith("uint8") and item.shape[-1:] == (3,):
        pixels = np.asarray(item.cpu() if isinstance(item, Tensor) else item)
        if pixels.ndim in (3, 4):
            return [Image.fromarray(one) for one in (pixels if pixels.ndim == 4 else [pixels])]
    return None


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
