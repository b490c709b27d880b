"""The unpacked size of a Parquet file's pages, by their own headers: Arrow reserves and fills as much.

Arrow ignores the sizes in the metadata at the file's end, so they are not trusted here. Layout: Parquet's
parquet.thrift (PageHeader), https://parquet.apache.org/docs/file-format/; numbers are in Thrift's compact protocol.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from swin_quant.base.reading import varint

_MOST_PAGES = 1 << 17  # in a column of a row group
_MOST_VALUES = 1 << 20  # in a file's metadata: Arrow makes an object of 700 bytes from four bytes
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
    """The pages of the column that is `size` bytes from `start`. ValueError if they are not pages."""
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
    """One walk through a Thrift message, without keeping it."""

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
