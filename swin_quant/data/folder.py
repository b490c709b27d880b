"""Pictures in folders, one folder a class: torchvision's ImageFolder layout."""

import os
from pathlib import Path

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import open_plain
from swin_quant.data.pictures import EXTENSIONS, MAX_BYTES, Pictures, UnreadablePicture, is_picture, printable


class FolderPictures(Pictures):
    """The pictures of `<folder>/<class>/**`; the label is the place of the class folder in sorted order.

    Classes, labels and order are those of torchvision's ImageFolder, except that dot-files are skipped, a class may
    be empty, and a loop of symbolic links is entered once. Links are followed: the folder is the user's own.

    Args:
        folder: the folder of one split.
        labelled: False accepts a flat folder too; its pictures get the label -1.

    Raises:
        SwinQuantError: nothing to read, or a folder that cannot be listed.
    """

    def __init__(self, folder: Path, labelled: bool = True) -> None:
        self.folder = folder
        classes = _class_folders(folder)
        found = [(file, label) for label, name in enumerate(classes) for file in _files(folder, name)]
        if not found and not labelled:
            found = [(file, -1) for file in _files(folder, ".")]
        if not found:
            layout = "<class>/<picture>" if labelled else "pictures"
            raise SwinQuantError(f"{folder}: found no pictures; expected {layout} with {', '.join(EXTENSIONS)}")
        self._files = [file for file, _ in found]
        self.names = [printable(file) for file in self._files]
        self.labels = [label for _, label in found]
        self.class_names = [printable(name) for name in classes]

    def open(self, index: int) -> bytes:
        """Return the bytes of one file. Raises UnreadablePicture, also for what is no regular file or over 64 MiB."""
        try:
            with open_plain(self.folder / self._files[index]) as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise UnreadablePicture(f"{self.names[index]}: {error.strerror}") from error
        if len(data) > MAX_BYTES:
            raise UnreadablePicture(f"{self.names[index]}: larger than {MAX_BYTES >> 20} MiB")
        return data


def _class_folders(folder: Path) -> list[str]:
    try:
        return sorted(item.name for item in os.scandir(folder) if item.is_dir() and not item.name.startswith("."))
    except OSError as error:
        raise SwinQuantError(f"{folder}: cannot be listed: {error.strerror}") from error


def _files(folder: Path, below: str) -> list[str]:
    """List the picture files under `folder/below` in ImageFolder's order, relative to `folder`, with `/`."""
    seen: set[tuple[int, int]] = set()
    levels = []
    for path, folders, files in os.walk(folder / below, followlinks=True, onerror=_cannot_list):
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if is_picture(name) and not name.startswith("."))
        levels.append((path, names))
    return [Path(path, name).relative_to(folder).as_posix() for path, names in sorted(levels) for name in names]


def _cannot_list(error: OSError) -> None:
    raise SwinQuantError(f"{error.filename}: cannot be listed: {error.strerror}") from error
