"""Zip archives that somebody else packed: every fault is a ValueError, and members unpack within bounds."""

import zipfile
from typing import BinaryIO

_ENCRYPTED = 0x1  # bit of the general purpose flag (PKWARE APPNOTE 4.4.4)


def opened(file: BinaryIO) -> zipfile.ZipFile:
    """The archive in `file`. ValueError says why it cannot be read."""
    try:
        return zipfile.ZipFile(file)
    except Exception as error:  # a damaged directory raises struct.error, NotImplementedError, ... beside BadZipFile
        raise ValueError(f"not a readable zip archive: {error}") from error


def unpacked(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """The bytes of a member, at most `limit`. ValueError says why it cannot be had."""
    try:
        member = archive.getinfo(name)
        if member.flag_bits & _ENCRYPTED:
            raise ValueError("encrypted")
        if member.file_size > limit:
            raise ValueError(f"larger than {limit >> 20} MiB" if limit >> 20 else f"larger than {limit} bytes")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("compressed by another method than deflate")  # the others unpack without a bound
        with archive.open(member) as file:
            return file.read(member.file_size)  # without the bound it would unpack more than was declared
    except Exception as error:  # damage shows as BadZipFile, zlib.error, EOFError, struct.error, ...
        raise ValueError(str(error) or type(error).__name__) from error
