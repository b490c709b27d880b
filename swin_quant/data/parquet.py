"""Pictures in Parquet files, as Hugging Face's `datasets` stores them: a column of encoded files, one of labels."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.base.files import open_plain
from swin_quant.base.reading import reading
from swin_quant.data.class_names import MAX_CLASSES, classed
from swin_quant.data.pictures import MAX_BYTES, Pictures, UnreadablePicture, printable
from swin_quant.data.source import DataRequest

IMAGES = ("image", "img", "jpg", "png", "picture", "bytes", "image_bytes")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
# Physical and logical types of single values
_BYTES = (("BYTE_ARRAY", "NONE"),)
_CLASSES = (
    ("INT32", "NONE"), ("INT32", "INT"), ("INT64", "NONE"), ("INT64", "INT"), ("BOOLEAN", "NONE"),
    ("BYTE_ARRAY", "STRING"),
)  # fmt: skip
# Limits of the metadata, of which Arrow makes large objects
_MOST_PARTS, _FREE_FOOTER, _PARTS_OF_FOOTER = 1 << 16, 2 << 20, 32
_MAX_ROWS = 1 << 24  # in all files together
_MAX_GROUP_BYTES = 1 << 30  # pictures held at a time
_SOME_PICTURES, _SOME_LABELS = range(1, 16), range(16, 1 << 12)  # least and most rows unpacked at a time
_FREE_TEXT, _TEXT = 1 << 22, 128  # bytes of labels in a file, and in each label
_FREE_BYTES, _FREE_ROWS, _TIMES = 1 << 26, 1 << 20, 16  # most output of a small file, and for each byte of a large one


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
            if _column(file, IMAGES, _BYTES) is None:
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
            label = _column(file, LABELS, _CLASSES)
            written += self._labels(number, label, len(places)) if label else [None] * len(places)
            features = features or (_features(file, label[0]) if label else None)
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
            self._held, self._group = self._unpack(number, group), (number, group)
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
                    end = file.seek(-8, os.SEEK_END)
                    size = int.from_bytes(file.read(4), "little")
                    if size > min(end, _FREE_FOOTER + end // _PARTS_OF_FOOTER):
                        raise ValueError(f"its metadata are of {size:,} bytes")
                self._opened[number] = parquet.ParquetFile(
                    str(path), buffer_size=1 << 20, thrift_container_size_limit=_MOST_PARTS
                )
        return self._opened[number]

    def _unpack(self, number: int, group: int) -> list[bytes | None]:
        held, total, path = list[bytes | None](), 0, self._paths[number]
        with reading(path, "Parquet file"):
            column = _column(self._file(number), IMAGES, _BYTES)
            assert column is not None  # the file was opened with it
            chunk = self._file(number).metadata.row_group(group).column(column[1])
            most = min(_MAX_GROUP_BYTES, _FREE_BYTES + _TIMES * min(chunk.total_compressed_size, path.stat().st_size))
            for values in self._values(number, [group], column, _SOME_PICTURES):
                total += values.nbytes
                if total > most:
                    raise SwinQuantError(f"{path}: row group {group} unpacks to more than {most >> 20} MiB of pictures")
                held += values.to_pylist()
        return held

    def _labels(self, number: int, column: tuple[str, int], rows: int) -> list[str | None]:
        """Labels as text, one object for each distinct label; None for no label."""
        path, file = self._paths[number], self._file(number)
        found, known, taken = list[str | None](), dict[str, str](), 0
        with reading(path, "Parquet file"):
            for values in self._values(number, range(file.num_row_groups), column, _SOME_LABELS):
                encoded = values.dictionary_encode()
                taken += encoded.dictionary.nbytes
                if taken > _FREE_TEXT + _TEXT * rows:
                    raise SwinQuantError(f"{path}: its column {printable(column[0])} holds more text than labels have")
                texts = [known.setdefault(str(value), str(value)) for value in encoded.dictionary.to_pylist()]
                found += [None if index is None else texts[index] for index in encoded.indices.to_pylist()]
                if len(found) > rows or len(known) > MAX_CLASSES:
                    raise SwinQuantError(f"{path}: more labels than {rows:,} pictures or {MAX_CLASSES:,} classes have")
        return found

    def _values(self, number: int, groups: Sequence[int], column: tuple[str, int], rows: range) -> Iterator[Any]:
        """The values of a column in row groups, fewer `rows` at a time where a single value may be large."""
        file, largest = self._file(number), 1
        for chunk in (file.metadata.row_group(group).column(column[1]) for group in groups):
            unpacked, size = chunk.total_uncompressed_size, chunk.total_compressed_size
            if unpacked > _FREE_BYTES + _TIMES * size:
                raise ValueError(f"a column of {size:,} bytes unpacks to {unpacked >> 20} MiB")
            largest = max(largest, unpacked)
        count = min(rows.stop, max(rows.start, _FREE_BYTES // 4 // largest))
        for batch in file.iter_batches(count, row_groups=list(groups), columns=[column[0]]):
            values = batch.column(0)
            values = values.flatten()[0] if hasattr(values, "flatten") else values
            yield values.dictionary_decode() if hasattr(values, "dictionary_decode") else values


def _column(file: Any, names: Sequence[str], types: Sequence[tuple[str, str]]) -> tuple[str, int] | None:
    """Path and number of the first column with one of these names, or its field `bytes`, if it is of one of these types
    and a row holds one value; else None."""
    columns = {file.schema.column(number).path: number for number in range(len(file.schema.names))}
    for path in (path for name in names for path in (name, f"{name}.bytes") if path in columns):
        found = file.schema.column(columns[path])
        if not found.max_repetition_level and (found.physical_type, found.logical_type.type) in types:
            return path, columns[path]
    return None


def _features(file: Any, label: str) -> list[str] | None:
    """The class names in the note that `datasets` leaves in the file; None without one."""
    try:
        note = json.loads((file.schema_arrow.metadata or {})[b"huggingface"])
        names = note["info"]["features"][label]["names"]
        return [printable(name) for name in names] if all(isinstance(name, str) for name in names) else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
