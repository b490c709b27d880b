"""Take formats apart into named parts and join them again, with right checksums and lengths.

Damage to the outside of a file stops at its first checksum; damage to a part reaches the code behind it.
"""

import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass

Part = tuple[bytes, bytes]
_METHODS = (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Container:
    """`take_apart` raises (anything) for other formats; `join` gets the random numbers of the case."""

    name: str
    take_apart: Callable[[bytes], list[Part]]
    join: Callable[[random.Random, list[Part]], bytes]


def parts_of(data: bytes, inside: Container | None = None) -> tuple[Container, list[Part]] | None:
    """The format of `data` and its parts; `inside` is the format that a part was taken from. None for plain bytes."""
    for container in (*CONTAINERS, *((PROTOBUF,) if inside is PROTOBUF else ())):
        try:
            if parts := container.take_apart(data):
                return container, parts
        except (Exception, RecursionError):  # noqa: BLE001, S112  it is another format
            continue
    return None


def _unzip(data: bytes) -> list[Part]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename.encode(), archive.read(info)) for info in archive.infolist()]


def _zip(rng: random.Random, parts: list[Part]) -> bytes:
    buffer = io.BytesIO()
    odd = rng.random() < 0.1
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # two members with one name are intended
        for name, content in parts:
            method = rng.choice(_METHODS) if odd else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name.decode(errors="replace")), content, method)
    return buffer.getvalue()


def _tensors(data: bytes) -> list[Part]:
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    json.loads(header)
    return [(b"header", header), (b"data", data[8 + size :])]


def _parquet(data: bytes) -> list[Part]:
    if data[:4] + data[-4:] != b"PAR1PAR1":
        raise ValueError
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return [(b"pages", data[4:start]), (b"footer", data[start:-8])]


def _with_footer(rng: random.Random, parts: list[Part]) -> bytes:
    size = len(parts[-1][1]).to_bytes(4, "little")
    return b"PAR1" + b"".join(content for _, content in parts) + size + b"PAR1"


def _chunks(data: bytes) -> list[Part]:
    if not data.startswith(_PNG):
        raise ValueError
    parts, at = [], len(_PNG)
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        parts.append((kind, data[at + 8 : at + 8 + size]))
        at += size + 12
    return parts


def _png(rng: random.Random, parts: list[Part]) -> bytes:
    chunks = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in parts)
    return _PNG + b"".join(chunks)


def _opcodes(data: bytes) -> list[Part]:
    if data[:1] != b"\x80":
        raise ValueError
    found = [(opcode.name.encode(), at) for opcode, _, at in pickletools.genops(data)]
    ends = [*(at for _, at in found[1:]), found[-1][1] + 1]
    parts = [(name, data[at:end]) for (name, at), end in zip(found, ends, strict=True)]
    rest = data[ends[-1] :]
    return parts + ([(b"rest", rest)] if rest else [])


def _json_parts(data: bytes) -> list[Part]:
    content = json.loads(data)
    if isinstance(content, dict):
        return [(json.dumps(key).encode(), json.dumps(value).encode()) for key, value in content.items()]
    if isinstance(content, list):
        return [(b"", json.dumps(value).encode()) for value in content]
    raise ValueError


def _json(rng: random.Random, parts: list[Part]) -> bytes:
    if any(key for key, _ in parts):
        return b"{%s}" % b", ".join((key or b'""') + b": " + value for key, value in parts)
    return b"[%s]" % b", ".join(value for _, value in parts)


def _lines(data: bytes) -> list[Part]:
    data.decode()
    lines = data.split(b"\n")
    return [(b"", line) for line in lines] if len(lines) > 1 else []


def _fields(data: bytes) -> list[Part]:
    """The fields of a protobuf message: tag, and content without its length."""
    parts, at = [], 0
    while at < len(data):
        tag, start = _varint(data, at)
        wire = tag & 7
        key = data[at:start]
        if wire == 2:
            size, start = _varint(data, start)
        else:
            size = {0: _varint(data, start)[1] - start, 1: 8, 5: 4}[wire]
        at = start + size
        if at > len(data) or not tag >> 3:
            raise ValueError
        parts.append((key, data[start:at]))
    return parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _as_varint(value: int) -> bytes:
    more = b""
    while value > 0x7F:
        more, value = more + bytes([value & 0x7F | 0x80]), value >> 7
    return more + bytes([value])


def _message(rng: random.Random, parts: list[Part]) -> bytes:
    return b"".join(key + (_as_varint(len(value)) if key and key[0] & 7 == 2 else b"") + value for key, value in parts)


PROTOBUF = Container("protobuf", _fields, _message)
CONTAINERS = (
    Container("zip", _unzip, _zip),
    Container("safetensors", _tensors, lambda rng, p: len(p[0][1]).to_bytes(8, "little") + b"".join(c for _, c in p)),
    Container("parquet", _parquet, _with_footer),
    Container("png", _chunks, _png),
    Container("pickle", _opcodes, lambda rng, parts: b"".join(content for _, content in parts)),
    Container("json", _json_parts, _json),
    Container("lines", _lines, lambda rng, parts: b"\n".join(content for _, content in parts)),
)
