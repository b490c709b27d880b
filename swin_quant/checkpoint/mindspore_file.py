"""Writing MindSpore's .ckpt without MindSpore: the messages of its checkpoint.proto, byte by byte.

Checkpoint { repeated Value value = 1 }, Value { string tag = 1; TensorProto tensor = 2 },
TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint.mindspore import TYPES

_NAMES = {kind: name for name, kind in TYPES.items()}


def ckpt_of(state: Mapping[str, Tensor]) -> bytes:
    """The file of tensors under their names. SwinQuantError for one of a type that MindSpore has not."""
    return b"".join(_field(1, _field(1, name.encode()) + _field(2, _tensor(name, x))) for name, x in state.items())


def _tensor(name: str, x: Tensor) -> bytes:
    if x.dtype not in _NAMES:
        raise SwinQuantError(f"{name}: is of type {x.dtype}, which MindSpore has not")
    content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    dims = b"".join(b"\x08" + _varint(size) for size in (x.shape or (0,)))  # it writes a scalar as [0]
    return dims + _field(2, _NAMES[x.dtype].encode()) + _field(3, content)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
