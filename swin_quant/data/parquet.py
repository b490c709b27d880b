"""Pictures inside Parquet files, as Hugging Face's `datasets` stores them: a column of encoded files, one of labels."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.extras import library
from swin_quant.data.labels import classed
from swin_quant.data.pictures import MAX_BYTES, Pictures, UnreadablePicture, printable
from swin_quant.data.source import DataSource, Wanted, files_of

IMAGES = ("image", "img", "jpg", "png", "picture", "bytes", "image_bytes")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_MAX_ROWS = 1 << 24  # of all files together
_MAX_GROUP_BYTES = 1 << 30  # of pictures that are held at a time
_ROWS = 16  # that are unpacked at a time


class ParquetPictures(Pictures):
    """The rows of Parquet files, named `<file>/<row>`. A picture is bytes, or a struct with them as `bytes`; labels are
    numbers or names, which Hugging Face's metadata or a `classes.txt` beside the files may name.

    One row group is held in memory at a time: in order, or at random within it, is quick; at random over many is not.

    Raises:
        SwinQuantError: a file that is missing, damaged or without pictures; a label that is wrong.
        UsageError: pyarrow is not installed.
    """

    def __init__(self, files: Sequence[Path], asked: Wanted) -> None:
        self._paths = list(files)
        self._opened: dict[int, Any] = {}
        self._owner = 0
        self._group: tuple[int, int] | None = None
        self._held: list[bytes | None] = []
        self._places: list[tuple[int, int, int]] = []
        self.names = []
        written: list[str | None] = []
        features: list[str] | None = None
        for number, path in enumerate(files):
            file = self._file(number)
            column = _column(path, file, IMAGES)
            if column is None:
                raise SwinQuantError(f"{path}: no column of pictures among {listed(file.schema_arrow.names)}")
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            if sum(sizes) + len(self._places) > _MAX_ROWS:
                raise SwinQuantError(f"{path}: more than {_MAX_ROWS:,} pictures in one data set")
            places = [(number, group, row) for group, size in enumerate(sizes) for row in range(size)]
            self._places += places
            self.names += [printable(f"{path.name}/{row:06d}") for row in range(len(places))]
            label = _column(path, file, LABELS)
            written += _labels(path, file, label) if label else [None] * len(places)
            features = features or _features(file, label)
            if len(written) != len(self._places):
                raise SwinQuantError(f"{path}: {len(self._places)} pictures, but {len(written)} labels")
        if not self._places:
            raise SwinQuantError(f"{files[0]}: holds no pictures")
        folder = files[0].parent
        self.labels, self.class_names = classed(written, asked.classes, folder, lambda place: self.names[place])
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
            try:
                self._opened[number] = parquet.ParquetFile(str(path))
            except Exception as error:  # ArrowInvalid, OSError, ... by what is damaged
                raise SwinQuantError(f"{path}: not a readable Parquet file: {error}") from error
        return self._opened[number]

    def _unpacked(self, number: int, group: int) -> list[bytes | None]:
        file, held, total = self._file(number), list[bytes | None](), 0
        column = _column(self._paths[number], file, IMAGES)
        try:
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                for value in batch.column(0).to_pylist():
                    data = value.get("bytes") if isinstance(value, dict) else value
                    held.append(data if isinstance(data, bytes) else None)
                    total += len(held[-1] or b"")
                if total > _MAX_GROUP_BYTES:
                    raise ValueError(f"row group {group} holds more than {_MAX_GROUP_BYTES >> 30} GiB of pictures")
        except Exception as error:
            raise SwinQuantError(f"{self._paths[number]}: cannot be read: {error}") from error
        return held


def _column(path: Path, file: Any, known: Sequence[str]) -> str | None:
    names = file.schema_arrow.names
    return next((name for name in known if name in names), None)


def _labels(path: Path, file: Any, column: str) -> list[str | None]:
    found: list[str | None] = []
    try:
        for batch in file.iter_batches(1 << 12, columns=[column]):
            for value in batch.column(0).to_pylist():
                found.append(str(value) if isinstance(value, int | str) else None)
            if len(found) > _MAX_ROWS:
                raise ValueError("more labels than rows")
    except Exception as error:
        raise SwinQuantError(f"{path}: its column {printable(column)} cannot be read: {error}") from error
    return found


def _features(file: Any, label: str | None) -> list[str] | None:
    """The class names in the note that `datasets` leaves; whatever else stands there is passed over."""
    try:
        note = json.loads((file.schema_arrow.metadata or {})[b"huggingface"])
        names = note["info"]["features"][label]["names"]
        return [printable(name) for name in names] if all(isinstance(name, str) for name in names) else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


SOURCE = DataSource(
    "parquet", "Parquet files of pictures", lambda asked: files_of(asked, ".parquet", "*.parquet"), ParquetPictures
)
