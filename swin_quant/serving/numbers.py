"""Long lists of numbers in JSON: counted before they are read, then read and written a piece at a time.

Python's own reader accepts ten million lists and answers no other request meanwhile.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from swin_quant.serving.limits import Refused

MOST_BESIDE = 2**16  # bytes of JSON beside the list of numbers
CUT: list[Any] = []  # replaces the list that was cut out
_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
_PIECE = 2**14  # bytes at a time: a fraction of a millisecond
_STRETCH = 2**20  # bytes at a time for work that takes a nanosecond a byte
_BRACKETS = bytes.maketrans(b"[]", b"  ")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def cut(text: bytes) -> tuple[bytes, bytes]:
    """The JSON with CUT in place of the first list called data, and the list. Refused if too much JSON is beside it."""
    found, data = _DATA.search(text, 0, MOST_BESIDE), b""
    if found:
        start = found.end()
        ends = [place for sign in (b'"', b"{", b"}") if (place := text.find(sign, start)) >= 0]  # never in numbers
        end = text.rfind(b"]", start, min(ends, default=len(text))) + 1
        if not end:
            raise Refused(400, "data must be numbers")
        text, data = text[:start] + b"[]" + text[end:], text[start:end]
    if len(text) > MOST_BESIDE:
        raise Refused(400, f"the body is not JSON of at most {MOST_BESIDE:,} bytes beside its data")
    return text, data


def read(text: bytes, shape: Sequence[int], kind: "np.dtype[Any]") -> np.ndarray:
    """The numbers of a list, flat or nested as `shape`. Refused for another count, and for anything but numbers.

    An integer `kind` refuses numbers that are not whole or do not fit.
    """
    wanted, found = math.prod(shape), _count(text, b",") + 1
    if found != wanted:
        found = found if text.strip(b"[] \t\r\n") else 0
        raise Refused(400, f"{found} values for the shape {list(shape)}, which has {wanted}")
    if not _is_nested(text, shape):
        raise Refused(400, "data must be numbers, flat or nested as the shape says")
    values, place = np.empty(wanted, kind), 0
    for piece in _pieces(text):
        try:
            numbers = np.array(json.loads(b"[" + piece.translate(_BRACKETS) + b"]"), np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise Refused(400, "data must be numbers") from error
        if kind.kind == "u" and not ((numbers >= 0) & (numbers <= np.iinfo(kind).max) & (numbers % 1 == 0)).all():
            raise Refused(400, f"data of {kind.name.upper()} must be whole numbers from 0 to {np.iinfo(kind).max}")
        with np.errstate(over="ignore"):  # a number that is too large becomes infinity
            values[place : place + len(numbers)] = numbers
        place += len(numbers)
        time.sleep(0)  # lets another thread have the interpreter's lock
    return values


def written(values: np.ndarray) -> bytes:
    """The values as a flat list in JSON."""
    pieces = []
    for place in range(0, len(values), _PIECE // 16):
        pieces.append(json.dumps(values[place : place + _PIECE // 16].tolist())[1:-1].encode())
        time.sleep(0)
    return b"[" + b", ".join(pieces) + b"]"


def _count(text: bytes, sign: bytes) -> int:
    return sum(text.count(sign, start, start + _STRETCH) for start in range(0, len(text), _STRETCH))


def _is_nested(text: bytes, shape: Sequence[int]) -> bool:
    """Whether the brackets nest as `shape`, perhaps with the last dimensions flat."""
    lists = _count(text, b"[")
    for depth in range(len(shape)):
        outer, row = shape[:depth], math.prod(shape[depth:])
        if lists == sum(math.prod(outer[:level]) for level in range(depth + 1)):
            expected = b"[" + b"," * (row - 1) + b"]"
            for size in reversed(outer):
                expected = b"[" + b",".join([expected] * size) + b"]"
            stretches = (text[start : start + _STRETCH] for start in range(0, len(text), _STRETCH))
            return b"".join(stretch.translate(None, _NO_STRUCTURE) for stretch in stretches) == expected
    return False


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces, cut at commas. Refused if one number is longer than a piece."""
    start = 0
    while start < len(text):
        end = text.find(b",", start + _PIECE, start + 2 * _PIECE)
        if end < 0:
            end = len(text)
        if end - start > 2 * _PIECE:
            raise Refused(400, "data must be numbers")
        yield text[start:end]
        start = end + 1
