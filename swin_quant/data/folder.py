"""Pictures in folders, one folder a class: torchvision's ImageFolder layout; and pictures given one by one.

Skipped files are counted and named.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.data.class_names import ILSVRC_CLASSES, fit, in_order, list_wnids
from swin_quant.data.pictures import EXTENSIONS, Pictures, is_picture, printable, read_bytes
from swin_quant.data.source import DataRequest

_LONGEST = 16  # shown characters of an extension


class FolderPictures(Pictures):
    """The pictures of `<folder>/<class>/**`; a label is the index of its class folder in sorted order, as numbers if
    they count from 0 or 1, else as text.

    The rest is as in torchvision's ImageFolder, except that dot-files are skipped, a class may be empty, and a folder
    is entered once. `folder` and `root` may be links; a link below that leads out of both is not followed (`Walk`).
    Warnings name skipped files and empty classes.

    Args:
        folder: the folder of one split.
        labelled: False accepts a flat folder too; its pictures get the label -1.
        root: the data folder that holds it, if one does.

    Raises:
        SwinQuantError: nothing to read, or a folder that cannot be listed.
    """

    def __init__(self, folder: Path, labelled: bool = True, root: Path | None = None) -> None:
        self.folder = folder
        walk = Walk([folder, root or folder])
        classes, beside = walk.listed(folder)
        classes = in_order(classes)
        found = [(file, label) for label, name in enumerate(classes) for file in walk.pictures(folder / name)]
        if not found and not labelled:
            walk = Walk(walk.roots)
            found = [(file, -1) for file in walk.pictures(folder)]
        else:
            walk.leave_out(beside, " beside the folders of classes")
        if not found:
            layout, others = "<class>/<picture>" if labelled else "pictures", walk.left_out(folder)
            expected = f"found no pictures; expected {layout} with {listed(EXTENSIONS)}"
            raise SwinQuantError(f"{folder}: {expected}{'; ' if others else ''}{others}")
        walk.tell(folder)
        held = {label for _, label in found}
        if empty := [printable(name) for label, name in enumerate(classes) if not held & {label, -1}]:
            log.warning("%s: %d of %d classes have no picture: %s", folder, len(empty), len(classes), listed(empty))
        self._files = [Path(file).relative_to(folder).as_posix() for file, _ in found]
        self.names = [printable(file) for file in self._files]
        self.labels = [label for _, label in found]
        self.class_names = [printable(name) for name in classes]

    def open(self, index: int) -> bytes:
        """Return the bytes of one file. Raises UnreadablePicture."""
        return read_bytes(self.names[index], self.folder / self._files[index])


class Walk:
    """A walk through folders, without hidden files. Links out of `roots`, or to a folder above themselves, are not
    followed: a foreign folder could otherwise reach all files of the user who reads it."""

    def __init__(self, roots: Iterable[str | os.PathLike[str]]) -> None:
        self.roots = [os.path.realpath(root) for root in roots]
        self._kinds: Counter[str] = Counter()
        self._links: dict[str, str] = {}  # real path of a link -> the path that reached it

    def listed(self, folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files in a folder, sorted. SwinQuantError if it cannot be listed."""
        found: tuple[list[str], list[str]] = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    is_link = entry.is_symlink()
                    if is_link:
                        target, parent = os.path.realpath(entry.path), os.path.realpath(folder)
                        if not any(map(Path(target).is_relative_to, self.roots)) or Path(parent).is_relative_to(target):
                            self._links.setdefault(os.path.join(parent, entry.name), entry.path)
                            continue
                    is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
                    found[0 if is_folder else 1].append(entry.name)
        except OSError as error:
            raise SwinQuantError(f"{printable(os.fspath(folder))}: cannot be listed: {error.strerror}") from error
        return sorted(found[0]), sorted(found[1])

    def pictures(self, folder: str | os.PathLike[str]) -> list[str]:
        """Paths of the pictures below a folder, in ImageFolder's order. A folder that several links reach counts
        once."""
        seen: set[tuple[int, int]] = set()
        levels, pending = [], [os.fspath(folder)]
        while pending:
            path = pending.pop()
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            folders, files = self.listed(path)
            pending += [os.path.join(path, name) for name in reversed(folders)]
            levels.append((path, list(filter(is_picture, files))))
            self.leave_out(sorted(set(files).difference(levels[-1][1])))
        return [os.path.join(path, name) for path, names in sorted(levels) for name in names]

    def leave_out(self, names: Iterable[str], where: str = "") -> None:
        """Count skipped files."""
        extensions = (os.path.splitext(name)[1].lower()[:_LONGEST] or "without an extension" for name in names)
        self._kinds.update(printable(extension) + where for extension in extensions)

    def left_out(self, place: str | os.PathLike[str]) -> str:
        """The skipped files, in words, with links relative to `place`; or empty."""
        reasons = []
        if self._kinds:
            kinds = listed(f"{count} {kind}" for kind, count in self._kinds.most_common())
            count = sum(self._kinds.values())
            reasons.append(f"{count} file{'s are' if count > 1 else ' is'} not taken for pictures: {kinds}")
        if self._links:
            names = listed((printable(os.path.relpath(link, place)) for link in sorted(self._links.values())), 3)
            reasons.append(
                f"{len(self._links)} links lead out of it, or to a folder above, and are not followed: {names}; copy "
                "what they lead to (cp -rL), or name the folder that they lead to"
            )
        return "; ".join(reasons)

    def tell(self, place: str | os.PathLike[str]) -> None:
        """Warn about skipped files."""
        if reasons := self.left_out(place):
            log.warning("%s: %s", place, reasons)


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


def open_wnids(files: list[Path], request: DataRequest) -> FolderPictures:
    """Class folders that are named by wnid, with the labels of the ImageNet of so many classes."""
    pictures, classes = FolderPictures(files[0], root=Path(request.place)), request.classes or ILSVRC_CLASSES
    known = list_wnids(classes)
    if known is None:
        raise SwinQuantError(f"{files[0]}: there is no ImageNet of {classes} classes")
    fit(pictures, classes, known, str(files[0]))
    return pictures
