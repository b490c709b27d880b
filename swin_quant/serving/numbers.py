"""Long lists of numbers in JSON, which is counted before it is read, and read and written a little at a time.

Python's own reader takes ten million lists as they come, and nobody else is answered meanwhile.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from swin_quant.serving.limits import Refused

MOST_BESIDE = 2**16  # bytes of JSON that are no list of numbers
CUT: list[Any] = []  # stands in place of a list that was cut out
_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
_PIECE = 2**14  # bytes at a time: a fraction of a millisecond
_STRETCH = 2**20  # bytes, of what takes a nanosecond each
_BRACKETS = bytes.maketrans(b"[]", b"  ")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def cut(text: bytes) -> tuple[bytes, bytes]:
    """JSON with CUT for the first list called data, and that list. Refused where too much is left beside it."""
    found, data = _DATA.search(text, 0, MOST_BESIDE), b""
    if found:
        start = found.end()
        ends = [place for sign in (b'"', b"{", b"}") if (place := text.find(sign, start)) >= 0]  # none is in numbers
        end = text.rfind(b"]", start, min(ends, default=len(text))) + 1
        if not end:
            raise Refused(400, "data must be numbers")
        text, data = text[:start] + b"[]" + text[end:], text[start:end]
    if len(text) > MOST_BESIDE:
        raise Refused(400, f"the body is not JSON of at most {MOST_BESIDE:,} bytes beside its data")
    return text, data


def read(text: bytes, shape: Sequence[int], kind: "np.dtype[Any]") -> np.ndarray:
    """The numbers of a list, flat or nested as `shape`. Refused where they are not as many, or no numbers.

    Those that are not whole, or do not fit, are refused where `kind` is of whole numbers.
    """
    wanted, given = math.prod(shape), _count(text, b",") + 1
    if given != wanted:
        given = given if text.strip(b"[] \t\r\n") else 0
        raise Refused(400, f"{given} values for the shape {list(shape)}, which has {wanted}")
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
        with np.errstate(over="ignore"):  # it becomes infinity
            values[place : place + len(numbers)] = numbers
        place += len(numbers)
        time.sleep(0)  # whoever waits for the interpreter's lock has it now
    return values


def written(values: np.ndarray) -> bytes:
    """A flat list of them."""
    pieces = []
    for place in range(0, len(values), _PIECE // 16):
        pieces.append(json.dumps(values[place : place + _PIECE // 16].tolist())[1:-1].encode())
        time.sleep(0)
    return b"[" + b", ".join(pieces) + b"]"


def _count(text: bytes, sign: bytes) -> int:
    return sum(text.count(sign, start, start + _STRETCH) for start in range(0, len(text), _STRETCH))


def _is_nested(text: bytes, shape: Sequence[int]) -> bool:
    """Whether the brackets are those of a list of `shape`, or of one whose last dimensions are one."""
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
    """The text, cut at commas. Refused where one number would be longer than a piece."""
    start = 0
    while start < len(text):
        end = text.find(b",", start + _PIECE, start + 2 * _PIECE)
        if end < 0:
            end = len(text)
        if end - start > 2 * _PIECE:
            raise Refused(400, "data must be numbers")
        yield text[start:end]
        start = end + 1
