"""Pictures in Parquet files, as Hugging Face's `datasets` stores them: a column of encoded files, one of labels.

Arrow allocates as much memory as page headers say, and ignores the sizes in the metadata at the file's end, so the
headers are checked first. Layout: Parquet's parquet.thrift (PageHeader), https://parquet.apache.org/docs/file-format/;
numbers are in Thrift's compact protocol.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import open_plain
from swin_quant.base.reading import reading, varint
from swin_quant.data.class_names import MAX_CLASSES, classed
from swin_quant.data.pictures import MAX_BYTES, Pictures, UnreadablePicture, printable
from swin_quant.data.source import DataRequest, DataSource, files_of

_MOST_PAGES = 1 << 17  # in a column of a row group
_MOST_VALUES = 1 << 20  # in a file's metadata: Arrow makes an object of 700 bytes from 4
_MAX_FOOTER = 64 << 20
_DEEPEST = 16
_BOOLS, _NUMBERS = (1, 2), (4, 5, 6)
_FIXED = {3: 1, 7: 8, 13: 16}  # byte, double, uuid
_BINARY, _LIST, _SET, _MAP, _STRUCT = 8, 9, 10, 11, 12


@dataclass(frozen=True)
class Page:
    """The size of a page in bytes, unpacked and in the file."""

    unpacked: int
    stored: int


def pages_of(file: BinaryIO, start: int, size: int) -> Iterator[Page]:
    """The pages of the column in `size` bytes from `start`. ValueError if they are not pages."""
    at, end = start, start + size
    for _ in range(_MOST_PAGES):
        if at >= end:
            return
        file.seek(at)
        header = _Thrift(file, _MOST_PAGES).struct()
        page = Page(header.get(2, -1), header.get(3, -1))
        if page.unpacked < 0 or page.stored < 0:
            raise ValueError("a page of no size")
        yield page
        at = file.tell() + page.stored
    raise ValueError(f"a column of more than {_MOST_PAGES:,} pages")


def check_footer(file: BinaryIO) -> None:
    """ValueError if the metadata at the end of a file have more parts than a file of pictures needs."""
    end = file.seek(-8, 2)
    size = int.from_bytes(file.read(4), "little")
    if size > min(end, _MAX_FOOTER):
        raise ValueError(f"its metadata are of {size:,} bytes")
    file.seek(end - size)
    _Thrift(file, _MOST_VALUES).struct()


class _Thrift:
    """One pass through a Thrift message, which is not kept."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self.file, self.left = file, most

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The integer fields of a struct, by field number."""
        found: dict[int, int] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.number()
            if (kind := head & 15) in _NUMBERS:
                found[number] = self.number()
            elif kind not in _BOOLS:
                self.skip(kind, depth)
        return found

    def skip(self, kind: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        if kind in _FIXED:
            self.file.seek(_FIXED[kind], 1)
        elif kind in _NUMBERS:
            varint(self.byte)
        elif kind == _BINARY:
            self.file.seek(varint(self.byte), 1)
        elif kind in (_LIST, _SET):
            head = self.byte()
            self.several(varint(self.byte) if head >> 4 == 15 else head >> 4, (head & 15,), depth)
        elif kind == _MAP:
            if count := varint(self.byte):
                head = self.byte()
                self.several(count, (head >> 4, head & 15), depth)
        elif kind == _STRUCT:
            self.struct(depth + 1)
        else:
            raise ValueError("not a message of Parquet")

    def several(self, count: int, kinds: tuple[int, ...], depth: int) -> None:
        for _ in range(count):
            for kind in kinds:
                self.skip(3 if kind in _BOOLS else kind, depth + 1)

    def byte(self) -> int:
        self.left -= 1
        data = self.file.read(1)
        if not data or self.left < 0:
            raise ValueError("more values than pictures need" if data else "cut short")
        return data[0]

    def number(self) -> int:
        value = varint(self.byte)
        return value >> 1 ^ -(value & 1)


IMAGES = ("image", "img", "jpg", "png", "picture", "bytes", "image_bytes")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_MAX_ROWS = 1 << 24  # in all files together
_MAX_GROUP_BYTES = 1 << 30  # pictures held at a time
_SOME_PICTURES, _SOME_LABELS = 16, 1 << 12  # unpacked at a time
_FREE_TEXT, _TEXT = 1 << 22, 128  # bytes of labels in a file, and in each label
_FREE_BYTES, _FREE_ROWS, _TIMES = 1 << 26, 1 << 20, 16  # most output of a small file, and for each byte of a large one


@dataclass(frozen=True)
class _Column:
    """A column of single values: its path in the file, its number, and how many rows are unpacked at a time."""

    path: str
    number: int
    rows: int


class ParquetPictures(Pictures):
    """The rows of Parquet files, named `<file>/<row>`. A picture is bytes, or a struct with a field `bytes`; labels are
    numbers or names, and Hugging Face's metadata or a `classes.txt` beside the files may name the classes.

    One row group is held in memory at a time: reading in order, or at random within a group, is quick; at random over
    many groups is slow.

    Raises:
        SwinQuantError: a file that is missing, damaged or without pictures; a wrong label.
        UsageError: pyarrow is not installed.
    """

    def __init__(self, files: Sequence[Path], request: DataRequest) -> None:
        self._paths = list(files)
        self._opened: dict[int, Any] = {}
        self._owner = 0
        self._group: tuple[int, int] | None = None
        self._held: list[bytes | None] = []
        self._places: list[tuple[int, int, int]] = []
        self.names = []
        written: list[str | None] = []
        features: list[str] | None = None
        stored = 0
        for number, path in enumerate(files):
            file = self._file(number)
            if _pictures_in(file) is None:
                raise SwinQuantError(f"{path}: no column of pictures among {listed(file.schema_arrow.names)}")
            sizes = [max(0, file.metadata.row_group(group).num_rows) for group in range(file.num_row_groups)]
            stored += path.stat().st_size
            if sum(sizes) + len(self._places) > min(_MAX_ROWS, _FREE_ROWS + stored):
                raise SwinQuantError(
                    f"{path}: lists {sum(sizes):,} pictures, more than its size or the limit of {_MAX_ROWS:,} allows"
                )
            places = [(number, group, row) for group, size in enumerate(sizes) for row in range(size)]
            self._places += places
            self.names += [printable(f"{path.name}/{row:06d}") for row in range(len(places))]
            label = next((name for name in LABELS if name in file.schema_arrow.names), None)
            written += self._labels(number, label, len(places)) if label else [None] * len(places)
            features = features or _features(file, label)
            if len(written) != len(self._places):
                raise SwinQuantError(f"{path}: {len(self._places)} pictures, but {len(written)} labels")
        if not self._places:
            raise SwinQuantError(f"{files[0]}: holds no pictures")
        folder = files[0].parent
        self.labels, self.class_names = classed(written, request.classes, folder, lambda place: self.names[place])
        if features and len(features) == len(self.class_names):
            self.class_names = features

    def open(self, index: int) -> bytes:
        """Return the bytes of one row. Raises UnreadablePicture, also when it is empty or over 64 MiB."""
        number, group, row = self._places[index]
        if self._group != (number, group) or self._owner != os.getpid():
            self._group, self._held = None, []
            self._held = self._unpacked(number, group)
            self._group = number, group
        data = self._held[row] if row < len(self._held) else None
        if data is None or len(data) > MAX_BYTES:
            problem = "no bytes of it are in the file" if data is None else f"larger than {MAX_BYTES >> 20} MiB"
            raise UnreadablePicture(f"{self.names[index]}: {problem}")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}, "_group": None, "_held": []}

    def _file(self, number: int) -> Any:
        if self._owner != os.getpid():  # a forked worker must not move its parent's files
            self._opened, self._owner = {}, os.getpid()
        if number not in self._opened:
            path, parquet = self._paths[number], library("pyarrow.parquet", "data")
            if not path.is_file():
                raise SwinQuantError(f"{path}: no such Parquet file")
            with reading(path, "Parquet file"):
                with open_plain(path) as file:
                    check_footer(file)
                self._opened[number] = parquet.ParquetFile(str(path), buffer_size=1 << 20)
        return self._opened[number]

    def _unpacked(self, number: int, group: int) -> list[bytes | None]:
        held, total = list[bytes | None](), 0
        with reading(self._paths[number], "Parquet file"):
            column = _pictures_in(self._file(number))
            assert column is not None  # the file was opened with it
            chunk = self._file(number).metadata.row_group(group).column(column.number)
            stored = min(chunk.total_compressed_size, self._paths[number].stat().st_size)
            most = min(_MAX_GROUP_BYTES, _FREE_BYTES + _TIMES * stored)
            for values in self._values(number, [group], column):
                total += values.nbytes
                if total > most:
                    raise SwinQuantError(
                        f"{self._paths[number]}: row group {group} unpacks to more than {most >> 20} MiB of pictures"
                    )
                held += values.to_pylist()
        return held

    def _labels(self, number: int, name: str, rows: int) -> list[str | None]:
        """Labels as text, one object for each distinct label; None for no label."""
        path, file = self._paths[number], self._file(number)
        if (column := _labels_in(file, name)) is None:
            return [None] * rows
        found, known, taken = list[str | None](), dict[str, str](), 0
        with reading(path, "Parquet file"):
            for values in self._values(number, range(file.num_row_groups), column):
                plain = values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
                encoded = plain.dictionary_encode()
                taken += encoded.dictionary.nbytes
                if taken > _FREE_TEXT + _TEXT * rows:
                    raise SwinQuantError(
                        f"{path}: its column {printable(column.path)} holds more text than labels have"
                    )
                texts = [known.setdefault(str(value), str(value)) for value in encoded.dictionary.to_pylist()]
                found += [None if index is None else texts[index] for index in encoded.indices.to_pylist()]
                if len(found) > rows or len(known) > MAX_CLASSES:
                    raise SwinQuantError(f"{path}: more labels than {rows:,} pictures or {MAX_CLASSES:,} classes have")
        return found

    def _values(self, number: int, groups: Sequence[int], column: _Column) -> Iterator[Any]:
        """The values of a column, some rows at a time: no value is larger than its page, or its dictionary's page."""
        file, largest = self._file(number), 1
        with open_plain(self._paths[number]) as stored:
            for group in groups:
                chunk = file.metadata.row_group(group).column(column.number)
                start = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
                start = min(start or chunk.data_page_offset, chunk.data_page_offset)
                for page in pages_of(stored, start, chunk.total_compressed_size):
                    if page.unpacked > _FREE_BYTES + _TIMES * page.stored:
                        raise ValueError(f"a page of {page.stored:,} bytes unpacks to {page.unpacked >> 20} MiB")
                    largest = max(largest, page.unpacked)
        rows = min(column.rows, max(1, _FREE_BYTES // 4 // largest))
        for batch in file.iter_batches(rows, row_groups=list(groups), columns=[column.path]):
            values = batch.column(0)
            yield values.flatten()[0] if hasattr(values, "flatten") else values


def _pictures_in(file: Any) -> _Column | None:
    """The column of pictures, as bytes or structs with bytes; None without one."""
    types: Any = library("pyarrow", "data").types
    name = next((name for name in IMAGES if name in file.schema_arrow.names), None)
    if name is None:
        return None
    kind, path = _type(file, name), name
    if types.is_struct(kind):
        inside = {kind.field(place).name: kind.field(place).type for place in range(kind.num_fields)}
        kind, path = inside.get("bytes"), f"{name}.bytes"
    known = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null)
    return _single(file, path, _SOME_PICTURES) if kind is not None and any(one(kind) for one in known) else None


def _labels_in(file: Any, name: str) -> _Column | None:
    """A column of numbers or text; None for any other type."""
    types: Any = library("pyarrow", "data").types
    kind = _type(file, name)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    known = (types.is_integer, types.is_boolean, types.is_string, types.is_large_string, types.is_string_view)
    return _single(file, name, _SOME_LABELS) if any(one(kind) for one in known) else None


def _type(file: Any, name: str) -> Any:
    return file.schema_arrow.field(file.schema_arrow.names.index(name)).type


def _single(file: Any, path: str, rows: int) -> _Column | None:
    """The column with this path; None if a row may hold several of its values."""
    columns = (file.schema.column(number) for number in range(len(file.schema.names)))
    found = (number for number, one in enumerate(columns) if one.path == path and not one.max_repetition_level)
    return next((_Column(path, number, rows) for number in found), None)


def _features(file: Any, label: str | None) -> list[str] | None:
    """The class names in the note that `datasets` leaves in the file; None without one."""
    try:
        note = json.loads((file.schema_arrow.metadata or {})[b"huggingface"])
        names = note["info"]["features"][label]["names"]
        return [printable(name) for name in names] if all(isinstance(name, str) for name in names) else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


SOURCE = DataSource(
    "parquet",
    "Parquet files of pictures",
    lambda request: files_of(request, ".parquet", "*.parquet"),
    ParquetPictures,
    names_own=True,
)
