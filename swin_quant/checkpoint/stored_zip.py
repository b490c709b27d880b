"""Zip archives with uncompressed members, as torch.save writes them.

Nothing is unpacked, so nothing can be larger than its file. The directory
ends where the file ends, so that no two readers find different ones.
Layout: PKWARE's APPNOTE 6.3, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase

_MAX_DIRECTORY_BYTES = 4 << 20
_END, _END64, _ENTRY, _LOCAL = (
    struct.Struct(f"<{form}") for form in ("4s4H2LH", "4sQ2H2L4Q 4sLQL", "4s6H3L5H2L", "4s5H3L2H")
)
_ENCRYPTED, _STORED, _ZIP64 = 0x1, 0, 0x0001
_SEE_ZIP64 = 0xFFFFFFFF
_PIECE = 1 << 20


class Damaged(Exception):
    """The archive is cut short or contradicts itself."""


class Compressed(Damaged):
    """A member is packed or encrypted; `names` of all members."""

    def __init__(self, names: list[str]) -> None:
        super().__init__("a member is compressed or encrypted")
        self.names = names


@dataclass(frozen=True)
class Member:
    """One file inside: its bytes are `size` from `start` on."""

    name: str
    start: int
    size: int
    crc: int
    stored: bool = True


def members(file: BufferedIOBase) -> dict[str, Member]:
    """The members of the archive `file` by name, in directory order. Raises Damaged or Compressed."""
    try:
        entries = list(_entries(_directory(file)))
        if not all(entry.stored for entry in entries):
            raise Compressed([entry.name for entry in entries])
        found = [_located(file, entry) for entry in entries]
    except (struct.error, UnicodeDecodeError) as error:
        raise Damaged(str(error)) from error
    by_name = {member.name: member for member in found}
    if len(by_name) != len(found) or sum(member.size for member in found) > _size(file):
        raise Damaged("two members in one place")
    return by_name


def read_into(file: BufferedIOBase, member: Member, buffer: memoryview) -> None:
    """Fill `buffer`, of the member's size, with its bytes. Raises Damaged, also for a wrong checksum."""
    file.seek(member.start)
    crc = at = 0
    while at < member.size:
        count = file.readinto(buffer[at : at + _PIECE])
        if not count:
            raise Damaged(f"{member.name} is cut short")
        crc, at = zlib.crc32(buffer[at : at + count], crc), at + count
    if crc != member.crc:
        raise Damaged(f"the checksum of {member.name} is wrong")


def read(file: BufferedIOBase, member: Member) -> bytes:
    """The bytes of a member."""
    buffer = bytearray(member.size)
    read_into(file, member, memoryview(buffer))
    return bytes(buffer)


def _size(file: BufferedIOBase) -> int:
    return os.fstat(file.fileno()).st_size


def _read_at(file: BufferedIOBase, start: int, size: int) -> bytes:
    if start < 0:
        raise Damaged("cut short")
    file.seek(start)
    return file.read(size)


def _directory(file: BufferedIOBase) -> bytes:
    """The central directory. It must lie right before the end record, or before the Zip64 one."""
    end = _size(file) - _END.size
    signature, *_, size, start, comment = _END.unpack(_read_at(file, end, _END.size))
    if signature != b"PK\x05\x06" or comment:
        raise Damaged("no end record at the end")
    if end >= _END64.size:
        long = _END64.unpack(_read_at(file, end - _END64.size, _END64.size))
        if long[0] == b"PK\x06\x06" and long[10] == b"PK\x06\x07":
            end, size, start = end - _END64.size, long[8], long[9]
    if start + size != end or size > _MAX_DIRECTORY_BYTES:
        raise Damaged("its directory is not before its end")
    return _read_at(file, start, size)


def _entries(directory: bytes) -> Iterator[Member]:
    """The entries of a directory; `start` is the offset of the local header."""
    at = 0
    while at < len(directory):
        signature, _, _, flags, method, _, _, crc, packed, size, name, extra, comment, *_, start = _ENTRY.unpack_from(
            directory, at
        )
        text = directory[at + _ENTRY.size : at + _ENTRY.size + name]
        at += _ENTRY.size + name + extra + comment
        if signature != b"PK\x01\x02" or at > len(directory):
            raise Damaged("its directory is broken")
        size, packed, start = _zip64(directory[at - extra - comment : at - comment], (size, packed, start))
        yield Member(text.decode(), start, size, crc, method == _STORED and size == packed and not flags & _ENCRYPTED)


def _zip64(extra: bytes, values: tuple[int, ...]) -> Iterator[int]:
    """Sizes and offsets; those that do not fit 32 bits come from the extra field."""
    long: list[int] = []
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == _ZIP64:
            long = [value for (value,) in struct.iter_unpack("<Q", extra[4 : 4 + size // 8 * 8])]
        extra = extra[4 + size :]
    for value in values:
        if value == _SEE_ZIP64 and not long:
            raise Damaged("a size is missing")
        yield long.pop(0) if value == _SEE_ZIP64 else value


def _located(file: BufferedIOBase, entry: Member) -> Member:
    """The entry with the offset of its bytes, after the local header."""
    signature, *_, name, extra = _LOCAL.unpack(_read_at(file, entry.start, _LOCAL.size))
    start = entry.start + _LOCAL.size + name + extra
    if signature != b"PK\x03\x04" or start + entry.size > _size(file):
        raise Damaged("a member is not where its directory says")
    return Member(entry.name, start, entry.size, entry.crc)
