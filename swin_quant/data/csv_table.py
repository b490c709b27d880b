"""Pictures listed in a table: CSV or TSV of path and label, also the metadata.csv of a Hugging Face image folder."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import read_bounded
from swin_quant.data.class_names import classed
from swin_quant.data.folder import FolderPictures
from swin_quant.data.pictures import is_picture, printable
from swin_quant.data.source import DataRequest, list_files

PATHS = ("path", "file_name", "filename", "file", "filepath", "image_path", "image", "name")
LABELS = ("label", "class", "target", "class_name", "category", "wnid", "labels")
SPLITS = ("split", "subset", "partition", "set")
_MAX_TABLE_BYTES = 1 << 30


class TablePictures(FolderPictures):
    """The pictures of a table, in its order; paths are relative to its folder, and `classed` reads the labels.

    The first row may name the columns (PATHS, LABELS and, if one file holds several splits, SPLITS; in any case);
    otherwise they are path and label. Tabs, commas or semicolons separate them. A missing file is an unreadable
    picture.

    Raises:
        SwinQuantError: names the table and the line.
    """

    def __init__(self, files: Sequence[Path], request: DataRequest) -> None:
        table = files[0]
        if len(files) > 1:
            raise SwinQuantError(f"{request.place}: {len(files)} tables of split {request.split}: name one of them")
        self.folder = table.parent
        lines: dict[str, tuple[int, str | None]] = {}
        for number, path, label in _rows(table, request.split):
            if path in lines:
                raise SwinQuantError(f"{table}, line {number}: {printable(path)[:200]} is listed a second time")
            lines[path] = number, label
        if not lines:
            raise SwinQuantError(f"{table}: lists no pictures of split {request.split}; expected path and label")
        self._files = list(lines)
        self.names = [printable(path) for path in lines]
        numbers, written = zip(*lines.values(), strict=True)
        labels, names = classed(written, request.classes, table.parent, lambda place: f"{table}, line {numbers[place]}")
        self.labels, self.class_names = labels, names


def _rows(table: Path, split: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, path, label) of each row of the split."""
    data = read_bounded(table, "table of pictures", _MAX_TABLE_BYTES)
    first = data[: data.find(b"\n")] if b"\n" in data else data
    delimiter = next((mark for mark in "\t,;" if mark.encode() in first), ",")
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    columns: tuple[int, int | None, int | None] | None = None
    try:
        for row in reader:
            fields = [field.strip() for field in row]
            if not any(fields):
                continue
            if columns is None:
                if any(map(is_picture, fields)):
                    columns = 0, 1 if len(fields) > 1 else None, None
                else:
                    names = [field.lower() for field in fields]
                    path, label, part = (
                        next((names.index(name) for name in known if name in names), None)
                        for known in (PATHS, LABELS, SPLITS)
                    )
                    if path is None:
                        expected = f"expected {' or '.join(PATHS)}"
                        raise SwinQuantError(f"{table}: no column of paths among {listed(fields)}; {expected}")
                    columns = path, label, part
                    continue
            path, label, part = columns
            if len(fields) <= max(place for place in columns if place is not None):
                raise SwinQuantError(f"{table}, line {reader.line_num}: has {len(fields)} columns, too few")
            if part is not None and fields[part] != split:
                continue
            if not is_picture(fields[path]):
                name = printable(fields[path])[:80]
                raise SwinQuantError(f"{table}, line {reader.line_num}: {name!r} is not the path of a picture")
            yield reader.line_num, fields[path], None if label is None else fields[label] or None
    except (csv.Error, UnicodeDecodeError) as error:
        raise SwinQuantError(f"{table}, line {reader.line_num + 1}: cannot be read: {error}") from error


def find_tables(request: DataRequest) -> list[Path]:
    """The tables of a split."""
    return list_files(request, ".csv", "metadata.csv") or list_files(request, ".tsv", "metadata.tsv")
