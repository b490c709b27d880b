"""Read and write MindSpore's .ckpt files, without MindSpore.

The file is a protobuf (checkpoint.proto; https://protobuf.dev/programming-guides/encoding):
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
_Message: TypeAlias = tuple[dict[int, list[int]], dict[int, list[memoryview]]]  # numbers and bytes, by field


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """The tensors of a .ckpt by MindSpore's names; a tensor in slices is joined. SwinQuantError for a damaged file."""
    data = memoryview(read_bounded(path, "checkpoint", MAX_BYTES))
    try:
        slices: dict[str, list[_Message]] = {}
        for entry in _parse(data)[1].get(1, []):
            _, fields = _parse(entry)
            if not fields.get(1, [b""])[-1] or 2 not in fields:
                raise ValueError("an entry without a name or a tensor")
            slices.setdefault(bytes(fields[1][-1]).decode(), []).append(_parse(fields[2][-1]))
        return {tag: _join_slices(tag, parts) for tag, parts in slices.items()}
    except ValueError as error:
        raise SwinQuantError(f"{path}: is cut short, damaged or not a checkpoint of MindSpore ({error})") from error


def _join_slices(tag: str, parts: list[_Message]) -> Tensor:
    (numbers, fields), content = parts[0], bytearray(b"".join(part[3][-1] for _, part in parts if 3 in part))
    dims = numbers.get(1, [])  # never packed: its syntax is that of protobuf 2
    kind = bytes(fields.get(2, [b""])[-1]).decode()
    if kind not in TYPES:
        raise ValueError(f"{tag:.80} is of type {kind:.20}")
    shape = () if dims == [0] else tuple(dims)  # MindSpore writes a scalar as [0]
    # Checked before an endless product, or torch's error
    fits = len(shape) <= 16 and prod(max(side, 1) for side in shape) < 2**63
    if not fits or prod(shape) * TYPES[kind].itemsize != len(content):
        raise ValueError(f"{tag:.80}: {len(content)} bytes are not {list(shape)[:16]} of {kind}")
    values = torch.frombuffer(content, dtype=TYPES[kind]) if content else torch.empty(0, dtype=TYPES[kind])
    return values.reshape(shape)


def _parse(data: memoryview) -> _Message:
    """The values of each field of a message."""
    numbers, chunks, at = dict[int, list[int]](), dict[int, list[memoryview]](), 0
    while at < len(data):
        key, at = _read_varint(data, at)
        value, at = _read_varint(data, at)
        if key & 7 == 0:
            numbers.setdefault(key >> 3, []).append(value)
        elif key & 7 == 2 and value <= len(data) - at:
            chunks.setdefault(key >> 3, []).append(data[at : at + value])
            at += value
        else:
            raise ValueError("it ends inside a field" if key & 7 == 2 else f"a field of wire type {key & 7}")
    return numbers, chunks


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
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


def encode_ckpt(state: Mapping[str, Tensor]) -> bytes:
    """The content of a .ckpt file with the tensors of `state`. SwinQuantError for a type that MindSpore lacks."""
    entries = []
    for name, x in state.items():
        if x.dtype not in _TYPE_NAMES:
            raise SwinQuantError(f"{name}: is of type {x.dtype}, which MindSpore lacks")
        content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dims = b"".join(b"\x08" + _write_varint(size) for size in (x.shape or (0,)))
        tensor = dims + _write_field(2, _TYPE_NAMES[x.dtype].encode()) + _write_field(3, content)
        entries.append(_write_field(1, _write_field(1, name.encode()) + _write_field(2, tensor)))
    return b"".join(entries)


def _write_field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _write_varint(len(content)) + content


def _write_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
