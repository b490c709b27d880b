"""Pictures in archives, read without extracting: a zip with a map file of labels (FasterTransformer spec, 2.6), and tar
files, webdataset's shards: `key.jpg` with its label in `key.cls`."""

import contextlib
import io
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import open_plain, read_bounded, read_lines
from swin_quant.base.progress import log
from swin_quant.base.reading import opened, reading, unpacked
from swin_quant.data.class_names import CLASSES_FILE, MAX_CLASSES, classed
from swin_quant.data.pictures import (
    EXTENSIONS,
    MAX_BYTES,
    Pictures,
    UnreadablePicture,
    is_picture,
    printable,
    read_bytes,
)
from swin_quant.data.source import DataRequest

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
            problem = f"{member!r} does not end in {listed(EXTENSIONS)}"
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


_MAX_LABEL_BYTES = 64
_MAX_HEADER_BYTES = 1 << 16  # for one read of tarfile: long names, pax records
_MAX_MEMBERS = 1 << 24  # in all shards together


_Place = tuple[int, int, int]  # number of the shard, first byte and size of a member


class ShardPictures(Pictures):
    """The pictures of shards, in the order of shards and members, named `<shard>/<member>`. A member's key is its name
    up to the first dot of the last part; the rest is its kind.

    The headers of all shards are read once; a picture is then read from its offset. The `classes.txt` beside the first
    shard names the classes, if it exists.

    Raises:
        SwinQuantError: a missing, compressed, truncated or damaged shard, or a wrong label; names file and member.
    """

    def __init__(self, shards: Sequence[Path], request: DataRequest) -> None:
        self._shards, folder = list(shards), shards[0].parent
        what = f"{shards[0]}" + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
        pictures: dict[tuple[int, str], tuple[str, _Place]] = {}
        labels: dict[tuple[int, str], str] = {}
        for number, shard in enumerate(shards):
            for name, place, label in _members(number, shard):
                parent, _, last = name.rpartition("/")
                key = number, f"{parent}/{last.partition('.')[0]}"
                if label is not None:
                    labels[key] = label
                    continue
                if key in pictures:
                    raise SwinQuantError(f"{shard}: {printable(name)[:200]}: a second picture of its key")
                pictures[key] = f"{shard.name}/{name}", place
                if len(pictures) > _MAX_MEMBERS:
                    raise SwinQuantError(f"{shard}: more than {_MAX_MEMBERS:,} pictures in one data set")
        if alone := [f"{shards[number].name}/{key.lstrip('/')}" for number, key in labels.keys() - pictures.keys()]:
            names = listed(map(printable, sorted(alone)), 3)
            log.warning("%s: %d labels have no picture of a known kind: %s", what, len(alone), names)
        if not pictures:
            raise SwinQuantError(f"{what}: no pictures in it; expected key.jpg and key.cls")
        self.names = [printable(name) for name, _ in pictures.values()]
        self._places = [place for _, place in pictures.values()]
        written = [labels.get(key) for key in pictures]
        self.labels, self.class_names = classed(
            written, request.classes, folder, lambda place: f"{folder / self.names[place]}"
        )

    def open(self, index: int) -> bytes:
        """Return the bytes of one member. Raises UnreadablePicture."""
        shard, start, size = self._places[index]
        return read_bytes(self.names[index], self._shards[shard], start, size)


class _Careful(io.RawIOBase):
    """A file for tarfile that limits each read to the size of a header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _members(number: int, shard: Path) -> Iterator[tuple[str, _Place, str | None]]:
    """(name, place, label) of each picture and label file in a shard; the label is None for a picture."""
    with reading(shard, "tar archive"), open_plain(shard) as file:
        if file.read(4)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
            raise SwinQuantError(f"{shard}: is compressed: unpack it to a plain .tar, whose members can be reached")
        file.seek(0)
        archive = tarfile.TarFile(fileobj=_Careful(file))
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            name = member.name
            while name.startswith("./"):
                name = name[2:]
            is_label = name.endswith(".cls")
            if not member.isreg() or member.issparse() or not (is_label or is_picture(name)):
                continue
            if name.startswith("/") or ".." in name.split("/") or "\\" in name:  # it is shown and hashed
                raise ValueError(f"{printable(name)[:200]!r} is not a plain relative path with '/'")
            place = number, member.offset_data, member.size
            if not is_label:
                yield name, place, None
                continue
            if member.size > _MAX_LABEL_BYTES:
                raise ValueError(f"{printable(name)[:200]}: a label of {member.size} bytes")
            file.seek(member.offset_data)
            text = file.read(member.size).decode("ascii", "replace").strip()
            if not re.fullmatch(r"[0-9]{1,9}", text):
                raise ValueError(f"{printable(name)[:200]}: label {printable(text)!r} is not a whole number")
            yield name, place, text
        file.seek(archive.offset)  # tarfile takes damage in the middle for the end
        if (block := file.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
            problem = "damaged" if len(block) == tarfile.BLOCKSIZE else "cut off"
            raise tarfile.ReadError(f"{problem} at byte {archive.offset}")
