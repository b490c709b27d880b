"""Read and write MindSpore's .ckpt files, without MindSpore.

The file is a protobuf (checkpoint.proto):
Checkpoint { repeated Value value = 1 }, Value { string tag = 1; TensorProto tensor = 2 },
TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_bounded

MAX_BYTES = 4 << 30

TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name.lower())
    for name in "Float32 Float16 Float64 BFloat16 Int8 UInt8 Int16 Int32 Int64 Bool".split()
}
_TYPE_NAMES = {kind: name for name, kind in TYPES.items()}
_Fields: TypeAlias = dict[int, list[int | memoryview]]  # by number


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """The tensors of a .ckpt by MindSpore's names; a tensor in slices is joined. SwinQuantError for a damaged file."""
    data = memoryview(read_bounded(path, "checkpoint", MAX_BYTES))
    try:
        slices: dict[str, list[_Fields]] = {}
        for entry in _fields(data).get(1, []):
            fields = _fields(entry)
            tag = bytes(_last(fields, 1)).decode()
            if not tag or 2 not in fields:
                raise ValueError("an entry without a name or a tensor")
            slices.setdefault(tag, []).append(_fields(_last(fields, 2)))
        return {tag: _tensor(tag, parts) for tag, parts in slices.items()}
    except ValueError as error:
        raise SwinQuantError(f"{path}: is cut short, damaged or not a checkpoint of MindSpore ({error})") from error


def _tensor(tag: str, parts: list[_Fields]) -> Tensor:
    dims: list[int] = []
    for sizes in parts[0].get(1, []):  # one, or several packed
        dims += [sizes] if isinstance(sizes, int) else []
        at = 0
        while not isinstance(sizes, int) and at < len(sizes):
            size, at = _varint(sizes, at)
            dims.append(size)
    kind = bytes(_last(parts[0], 2)).decode()
    if kind not in TYPES:
        raise ValueError(f"{tag:.80} is of type {kind:.20}")
    content = bytearray(b"".join(bytes(_last(part, 3)) for part in parts))
    size = torch.empty((), dtype=TYPES[kind]).element_size()
    shape = () if dims == [0] else tuple(dims)  # MindSpore writes a scalar as [0]
    # Checked before an endless product, or torch's error
    fits = len(shape) <= 16 and prod(max(side, 1) for side in shape) < 2**63
    if not fits or prod(shape) * size != len(content):
        raise ValueError(f"{tag:.80}: {len(content)} bytes are not {list(shape)[:16]} of {kind}")
    values = torch.frombuffer(content, dtype=TYPES[kind]) if content else torch.empty(0, dtype=TYPES[kind])
    return values.reshape(shape)


def _fields(data: int | memoryview) -> _Fields:
    """The values of each field of a protobuf message (https://protobuf.dev/programming-guides/encoding)."""
    if isinstance(data, int):
        raise ValueError("a number where bytes should be")
    found: _Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 not in (0, 2):
            raise ValueError(f"a field of wire type {key & 7}")
        value, at = _varint(data, at)
        if key & 7 == 0:
            found.setdefault(key >> 3, []).append(value)
            continue
        if value > len(data) - at:
            raise ValueError("it ends inside a field")
        found.setdefault(key >> 3, []).append(data[at : at + value])
        at += value
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, in groups of 7 bits, the lowest first, and the place behind it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("it ends inside a field")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _last(fields: _Fields, number: int) -> memoryview:
    """The last value of a field of bytes; empty if there is none."""
    value = fields.get(number, [memoryview(b"")])[-1]
    if isinstance(value, int):
        raise ValueError("a number where bytes should be")
    return value


def encode_ckpt(state: Mapping[str, Tensor]) -> bytes:
    """The content of a .ckpt file with the tensors of `state`. SwinQuantError for a type that MindSpore lacks."""
    entries = []
    for name, x in state.items():
        if x.dtype not in _TYPE_NAMES:
            raise SwinQuantError(f"{name}: is of type {x.dtype}, which MindSpore lacks")
        content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dims = b"".join(b"\x08" + _encoded_varint(size) for size in (x.shape or (0,)))
        tensor = dims + _field(2, _TYPE_NAMES[x.dtype].encode()) + _field(3, content)
        entries.append(_field(1, _field(1, name.encode()) + _field(2, tensor)))
    return b"".join(entries)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _encoded_varint(len(content)) + content


def _encoded_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
