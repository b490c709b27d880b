"""Pictures in tar archives, webdataset's shards: `key.jpg` with its label in `key.cls`, read without extracting."""

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import open_plain
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.data.class_names import classed
from swin_quant.data.pictures import Pictures, is_picture, printable, read_bytes
from swin_quant.data.source import DataRequest

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
