"""Arrays in files of NumPy: .npz archives, and folders of .npy files, which may be anybody's."""

import io
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import atomic_write_bytes, open_plain, read_bounded, reason
from swin_quant.base.reading import opened, reads, unpacked

MAX_BYTES = 4 << 30  # all arrays of a file or folder together
_MAX_ARRAYS = 100_000
_MAX_RANK = 32
_HEADER = re.compile(  # numpy's own reader evaluates it as Python
    rb"\{'descr': '([<>|=]?[fiub][1248])', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d{1,12}, ?)*(?:\d{1,12})?)\), \}\s*"
)


@reads("dump of arrays")
def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz in its order, or of the .npy files below a folder, sorted, by their paths without ending.

    Numbers only, of types of 1 to 8 bytes. SwinQuantError names the file and the array.
    """
    path = Path(path)
    if not path.is_dir():
        try:
            with open_plain(path) as file:
                return unpack_arrays(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise SwinQuantError(f"{path}: cannot be read: {reason(error)}") from error
        except ValueError as error:
            raise SwinQuantError(f"{path}: is no .npz of arrays: {one_line(str(error))}") from error
    found: dict[str, NDArray[Any]] = {}
    total = 0
    for each in sorted(path.rglob("*.npy")):
        name = each.relative_to(path).as_posix().removesuffix(".npy")
        data = read_bounded(each, "array", MAX_BYTES - total)
        total += len(data)
        try:
            found[name] = _array(name, data)
        except ValueError as error:
            raise SwinQuantError(f"{each}: is no array: {one_line(str(error))}") from error
        if len(found) > _MAX_ARRAYS:
            raise SwinQuantError(f"{path}: holds more than {_MAX_ARRAYS:,} arrays")
    if not found:
        raise SwinQuantError(f"{path}: holds no .npy")
    return found


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # names are arrays' here, not its own options
    atomic_write_bytes(path, buffer.getbuffer())


def unpack_arrays(file: BinaryIO, size: int, most: int = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz of `size` bytes, which has at most `most` unpacked. ValueError says what is wrong."""
    with opened(file) as archive:
        members = archive.infolist()
        total = sum(member.file_size for member in members)
        if len(members) > _MAX_ARRAYS or total > most:
            raise ValueError(f"holds {len(members)} arrays of {total >> 20} MB: too many")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("holds two arrays of one name")
        found = {}
        for member in members:
            if member.file_size > 1100 * max(member.compress_size, 1) or member.compress_size > size:
                raise ValueError(f"{member.filename[:200]}: declares {member.file_size} bytes: too many")
            name = member.filename.removesuffix(".npy")
            found[name] = _array(name, unpacked(archive, member.filename, most))
        return found


def _array(name: str, data: bytes) -> NDArray[Any]:
    """The array in a .npy file (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)."""
    if data[:6] != b"\x93NUMPY" or data[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise ValueError(f"{name[:200]} is no array")
    start = 10 if data[6] == 1 else 12
    end = start + int.from_bytes(data[8:start], "little")
    header = _HEADER.fullmatch(data[start:end]) if end - start <= 4096 else None
    if header is None:
        raise ValueError(f"{name[:200]} is no array of plain numbers")
    kind = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in header[3].decode().replace(" ", "").split(",") if size)
    if len(shape) > _MAX_RANK or math.prod(shape) * kind.itemsize != len(data) - end:
        raise ValueError(f"{name[:200]}: {len(data) - end} bytes are not {list(shape)[:_MAX_RANK]} of {kind}")
    return np.frombuffer(data, kind, offset=end).reshape(shape, order="F" if header[2] == b"True" else "C")
