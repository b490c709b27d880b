"""Pictures in a zip archive with a map file of labels, read without extracting (FasterTransformer spec, 2.6)."""

import contextlib
import io
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import open_plain, read_bounded, read_lines
from swin_quant.base.reading import opened, unpacked
from swin_quant.data.class_names import CLASSES_FILE, MAX_CLASSES
from swin_quant.data.pictures import EXTENSIONS, MAX_BYTES, Pictures, UnreadablePicture, is_picture, printable

MAX_MAP_BYTES = 1 << 30  # twice the map of ImageNet-22k


class ZipPictures(Pictures):
    """The members of `<root>/<split>.zip` listed in `<root>/<split>_map.txt`, in its order.

    Lines of the map are `member<TAB>label`; blank ones are skipped. An optional `<root>/classes.txt` names the classes,
    one a line in label order.

    Args:
        num_classes: labels must be below it; None takes any label.

    Raises:
        SwinQuantError: an archive or map that cannot be used; the message names file and line.
    """

    def __init__(self, root: Path, split: str, num_classes: int | None = None) -> None:
        self.path = root / f"{split}.zip"
        self._archive: zipfile.ZipFile | None = None
        self._owner = 0  # id of the process that opened the archive
        self._cache: dict[int, bytes] = {}
        self.names, self.labels = _read_map(root / f"{split}_map.txt", self._opened(), num_classes)
        names, count = root / CLASSES_FILE, num_classes or max(self.labels) + 1
        named = os.path.lexists(names)
        self.class_names = read_lines(names, "list of class names") if named else list(map(str, range(count)))

    def hold(self, indices: Iterable[int]) -> None:
        """Read the bytes of these pictures into memory; all others are read when needed."""
        for index in indices:
            with contextlib.suppress(UnreadablePicture):  # counted when the picture is read
                self._cache[index] = self._member(self.names[index])

    def open(self, index: int) -> bytes:
        """Return the bytes of one member. Raises UnreadablePicture, also when encrypted or over 64 MiB."""
        return self._cache[index] if index in self._cache else self._member(self.names[index])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_archive": None, "_owner": 0}

    def _opened(self) -> zipfile.ZipFile:
        # A forked worker that used its parent's file would move the read position of all others.
        if self._archive is None or self._owner != os.getpid():
            try:
                self._archive, self._owner = opened(open_plain(self.path)), os.getpid()
            except FileNotFoundError as error:
                raise SwinQuantError(f"{self.path}: no such file; ‹zip› reads SPLIT.zip") from error
            except (OSError, ValueError) as error:
                raise SwinQuantError(f"{self.path}: {error}") from error
        return self._archive

    def _member(self, name: str) -> bytes:
        try:
            return unpacked(self._opened(), name, MAX_BYTES)
        except ValueError as error:
            raise UnreadablePicture(f"{name}: {error}") from error


def _read_map(path: Path, archive: zipfile.ZipFile, num_classes: int | None) -> tuple[list[str], list[int]]:
    held = Counter(archive.namelist())
    labels: dict[str, int] = {}
    limit = num_classes or MAX_CLASSES
    if not path.is_file():
        raise SwinQuantError(f"{path}: no such file; an archive needs this file of member<TAB>label lines")
    for number, line in enumerate(io.BytesIO(read_bounded(path, "map of labels", MAX_MAP_BYTES)), 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SwinQuantError(f"{path}, line {number}: not UTF-8 text") from error
        fields = text.split("\t") if "\t" in text else text.rstrip().rsplit(maxsplit=1)  # names may hold blanks
        member, label = fields if len(fields) == 2 else ("", "")
        is_outside = re.match(r"/|[A-Za-z]:", member) or "\\" in member or ".." in member.split("/")
        problem = ""
        if len(fields) != 2:
            problem = f"expected member<TAB>label, found {len(fields) - 1} tabs"
        elif is_outside or not member.isprintable():
            problem = f"{printable(member)!r} is not a plain relative path with '/'"
        elif not is_picture(member):
            problem = f"{member!r} does not end in {', '.join(EXTENSIONS)}"
        elif not re.fullmatch(r"-?[0-9]{1,9}", label.strip()):
            problem = f"label {label!r} is not an integer"
        elif not 0 <= int(label) < limit:
            why = f" (MODEL.NUM_CLASSES is {num_classes})" if num_classes else ""
            problem = f"label {int(label)} is outside 0 to {limit - 1}{why}"
        elif member in labels:
            problem = f"{member} is listed a second time"
        elif held[member] != 1:
            problem = f"{member} is {f'{held[member]} times in' if held[member] else 'missing from'} {archive.filename}"
        if problem:
            raise SwinQuantError(f"{path}, line {number}: {problem}")
        labels[member] = int(label)
    if not labels:
        raise SwinQuantError(f"{path}: lists no pictures; expected member<TAB>label lines")
    return list(labels), list(labels.values())
