"""The bytes of an ONNX file before protobuf parses them: how many messages they would become, whether text is text.

Protobuf makes an object of a hundred bytes from two bytes of file, and takes any bytes for text until they are read.
Encoding: protobuf.dev, "Encoding". The schema is that of the onnx package.
"""

from functools import cache
from typing import Any

from swin_quant.base.errors import SwinQuantError

MAX_FIELDS = 600_000  # a Swin-L has a third of that
MAX_SMALL_NUMBERS = 2**24  # integers of variable length, which take 8 bytes where the file has 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TEXT, _MESSAGE, _RAW = 9, 11, 12  # FieldDescriptor.Type
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_FIXED_TYPES = (1, 2, 6, 7, 15, 16)  # double, float and the fixed integers: as large in memory as in the file


def check_wire(data: bytes, descriptor: Any) -> None:
    """SwinQuantError unless `data` are a message of `descriptor` within bounds, every text in it UTF-8."""
    try:
        _walk(data, descriptor)
    except (IndexError, UnicodeDecodeError) as error:
        fault = "a text in it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it is cut short"
        raise SwinQuantError(f"is not an ONNX file: {fault}") from error


def _walk(data: bytes, descriptor: Any) -> None:
    count = small = 0
    pending = [(0, len(data), descriptor)]
    while pending:
        at, end, kind = pending.pop()
        fields = _fields(kind)
        while at < end:
            count += 1
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _BYTES:
                size, start = _varint(data, at)
                at = start + size
                if at > end:
                    raise IndexError
                type_, message = fields.get(number, (_RAW, None))
                if type_ == _MESSAGE:
                    pending.append((start, at, message))
                elif type_ == _TEXT:
                    data[start:at].decode()
                elif type_ != _RAW and type_ not in _FIXED_TYPES:
                    small += size
            elif wire in _FIXED:
                at += _FIXED[wire]
            else:
                raise IndexError
            if at > end:
                raise IndexError
            if count > MAX_FIELDS or small > MAX_SMALL_NUMBERS:
                raise SwinQuantError(f"holds more than {MAX_FIELDS:,} fields: no Swin has that")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to ten bytes, seven bits each, and where the next one is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


@cache
def _fields(descriptor: Any) -> dict[int, tuple[int, Any]]:
    return {number: (field.type, field.message_type) for number, field in descriptor.fields_by_number.items()}
