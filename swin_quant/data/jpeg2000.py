"""Count the code blocks of a JPEG 2000 file: openjpeg keeps some 300 bytes for each, empty or not.

Source: ITU-T T.800, annexes A (markers) and I (boxes).
"""

import struct
from collections.abc import Iterator

_START = b"\xff\x4f\xff\x51"  # SOC, SIZ
_COD, _COC = 0xFF52, 0xFF53
_LEVELS = {_COD: 9, _COC: 6}  # bytes from the marker to the number of levels; the style is 5 or 1 before
_STYLE = {_COD: 4, _COC: 5}
_TILE, _DATA, _END = 0xFF90, 0xFF93, 0xFFD9
_KNOWN = {_TILE, _COD, _COC, *(0xFF00 | low for low in b"\x50\x51\x55\x57\x58\x59\x5c\x5d\x5e\x5f\x60\x61\x63\x64")}


def code_blocks(data: bytes, pixels: int) -> float:
    """About how many code blocks a component of `pixels` pixels has, by the finest coding. ValueError for a damaged
    file."""
    try:
        return max(pixels * sum(_density(data, at, marker)) for at, marker in _codings(data))
    except (struct.error, IndexError) as error:
        raise ValueError("cut off in its headers") from error


def _density(data: bytes, at: int, marker: int) -> Iterator[float]:
    """Code blocks a pixel, for each resolution; a block is no larger than its precinct."""
    first = at + _LEVELS[marker]
    levels, width, height = data[first], data[first + 1] + 2, data[first + 2] + 2
    has_precincts = data[at + _STYLE[marker]] & 1
    for level in range(levels + 1):
        precinct = data[first + 5 + level] if has_precincts else 0xFF
        across, down = ((exponent - (level > 0)) for exponent in (precinct & 15, precinct >> 4))
        yield 0.25 ** (levels - level) / 2.0 ** (min(width, across) + min(height, down))


def _codings(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, marker) of each COD and COC in the main header and in tile headers."""
    at, tile_end = _codestream(data) + 2, 0
    while at < len(data):
        (marker,) = struct.unpack_from(">H", data, at)
        if marker == _END:
            return
        if marker == _DATA and tile_end > at:
            at = tile_end
            continue
        if marker not in _KNOWN:  # its length is unknown, and a decoder may guess differently
            raise ValueError(f"marker {marker:04X} in its headers")
        if marker == _TILE:
            (length,) = struct.unpack_from(">I", data, at + 6)
            tile_end = at + length if length else len(data)
        if marker in _LEVELS:
            yield at, marker
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]


def _codestream(data: bytes) -> int:
    """The offset of the codestream: the file's start, or inside the first box of that kind."""
    at = 0
    while not data.startswith(_START, at):
        size, kind = struct.unpack_from(">I4s", data, at)
        head = 16 if size == 1 else 8
        if kind == b"jp2c":
            return at + head
        (size,) = struct.unpack_from(">Q", data, at + 8) if size == 1 else (size,)
        if size < head:
            raise ValueError("no codestream")
        at += size
    return at
