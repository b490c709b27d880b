"""Convert MindSpore's parameter names for Swin and ResNet, both ways; read and write its .ckpt files without it.

Names of mindcv (https://github.com/mindspore-lab/mindcv) and of the model zoo, which differ in heads and shortcuts;
the tensors are the same, except that attention has q, k and v apart. The file is a protobuf (checkpoint.proto):
Checkpoint { repeated Value value = 1 }, Value { string tag = 1; TensorProto tensor = 2 },
TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_bounded
from swin_quant.base.reading import Cursor, varint

NAME = "MindSpore"
MAX_BYTES = 4 << 30

# MindSpore's words -> ours; every spelling is read, and the first is written.
WORDS = (
    (("gamma",), "weight"),
    (("beta",), "bias"),
    (("moving_mean",), "running_mean"),
    (("moving_variance",), "running_var"),
    (("embedding_table",), "weight"),
)
PARTS = {
    "swin": (
        (("classifier", "head"), "head"),
        (("attn.relative_bias.relative_position_bias_table",), "attn.relative_position_bias_table"),
    ),
    "resnet": (
        (("classifier", "end_point", "fc"), "fc"),
        (("down_sample", "down_sample_layer", "downsample"), "downsample"),
    ),
}
_NORM = re.compile(r"(^|\.)(norm\d*|bn\d*|downsample\.1|layernorm\w*)$")  # their weight is called gamma
_DERIVED = re.compile(r"\.(relative_bias\.index|attn_mask|relative_position_index|num_batches_tracked)$")
# A gamma alone proves nothing: timm's layer scale has one, too.
_SEEN = re.compile(r"(\.(beta|moving_mean|moving_variance|embedding_table)|\.attn\.relative_bias\..+)$")
_QKV = ("q", "k", "v")
TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name.lower())
    for name in "Float32 Float16 Float64 BFloat16 Int8 UInt8 Int16 Int32 Int64 Bool".split()
}
_TYPE_NAMES = {kind: name for name, kind in TYPES.items()}


def is_mindspore(keys: Iterable[str]) -> bool:
    """Whether parameters have MindSpore's names: one word that only MindSpore uses is enough."""
    return any(_SEEN.search(key) for key in keys)


def family_in(keys: Iterable[str]) -> str:
    """`resnet` where there is a layer1, else `swin`."""
    return "resnet" if any(key.startswith("layer1.") for key in keys) else "swin"


def from_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under our names (Microsoft's for Swin, torchvision's for ResNet), without derived buffers.

    SwinQuantError where a q, k or v is missing, or two names become one.
    """
    parts = PARTS[family_in(state)]
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if _DERIVED.search(key):
            continue
        new = _replaced(key, ((theirs, ours) for all_theirs, ours in (*parts, *WORDS) for theirs in all_theirs))
        if new in renamed:
            raise SwinQuantError(f"two parameters of MindSpore become {new}")
        renamed[new] = tensor
    return _joined(renamed)


def to_mindspore(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under mindcv's names. SwinQuantError for a qkv that cannot be split in three."""
    kind = family_in(state)
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        module, _, word = key.rpartition(".")
        if _DERIVED.search(key):
            continue
        if module.endswith(".attn.qkv"):
            if len(tensor) % 3:
                raise SwinQuantError(f"{key}: {list(tensor.shape)} is not of q, k and v")
            at = module.removesuffix("qkv")
            found |= {f"{at}{name}.{word}": part for name, part in zip(_QKV, tensor.chunk(3), strict=True)}
            continue
        if _NORM.search(module):
            word = _replaced(word, ((ours, theirs[0]) for theirs, ours in WORDS[:4]))
        found[_replaced(f"{module}.{word}", ((ours, theirs[0]) for theirs, ours in PARTS[kind]))] = tensor
    return found


def _replaced(key: str, words: Iterable[tuple[str, str]]) -> str:
    for old, new in words:
        key = re.sub(rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{new}", key)
    return key


def _joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v of every attention as one qkv."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        split = re.fullmatch(r"(.*\.attn\.)([qkv])\.(weight|bias)", key)
        if split is None:
            found[key] = tensor
        elif split[2] == "q":
            names = [f"{split[1]}{part}.{split[3]}" for part in _QKV]
            if missing := [name for name in names if name not in state]:
                raise SwinQuantError(f"{missing[0]}: is missing beside {key}")
            found[f"{split[1]}qkv.{split[3]}"] = torch.cat([state[name] for name in names])
        elif f"{split[1]}q.{split[3]}" not in state:
            raise SwinQuantError(f"{split[1]}q.{split[3]}: is missing beside {key}")
    return found


def looks_like_ckpt(path: Path, head: bytes) -> bool:
    """Whether a file is MindSpore's by its name and first byte: torch's zip files may end in .ckpt, too."""
    return path.suffix == ".ckpt" and head[:1] == b"\x0a"


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """The tensors of a .ckpt by MindSpore's names; a tensor in slices is joined. SwinQuantError for a damaged file."""
    data = memoryview(read_bounded(path, "checkpoint", MAX_BYTES))
    try:
        slices: dict[str, list[tuple[tuple[int, ...], str, memoryview]]] = {}
        for field, value in _fields(data):
            if field == 1:
                tag, tensor = _value(_bytes(value))
                slices.setdefault(tag, []).append(tensor)
        return {tag: _tensor(tag, parts) for tag, parts in slices.items()}
    except ValueError as error:
        raise SwinQuantError(f"{path}: is cut short, damaged or not a checkpoint of MindSpore ({error})") from error


def _value(data: memoryview) -> tuple[str, tuple[tuple[int, ...], str, memoryview]]:
    tag, tensor = "", None
    for field, value in _fields(data):
        if field == 1:
            tag = bytes(_bytes(value)).decode()
        elif field == 2:
            tensor = _parts(_bytes(value))
    if not tag or tensor is None:
        raise ValueError("an entry without a name or a tensor")
    return tag, tensor


def _parts(data: memoryview) -> tuple[tuple[int, ...], str, memoryview]:
    dims: list[int] = []
    kind, content = "", memoryview(b"")
    for field, value in _fields(data):
        if field == 1:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif field == 2:
            kind = bytes(_bytes(value)).decode()
        elif field == 3:
            content = _bytes(value)
    return tuple(dims), kind, content


def _tensor(tag: str, parts: list[tuple[tuple[int, ...], str, memoryview]]) -> Tensor:
    shape, kind, _ = parts[0]
    if kind not in TYPES:
        raise ValueError(f"{tag:.80} is of type {kind:.20}")
    content = bytearray(b"".join(bytes(part[2]) for part in parts))
    size = torch.empty((), dtype=TYPES[kind]).element_size()
    shape = () if shape == (0,) else shape  # MindSpore writes a scalar as [0]
    fits = len(shape) <= 16 and prod(max(side, 1) for side in shape) < 2**63  # before an endless product, or torch's
    if not fits or prod(shape) * size != len(content):
        raise ValueError(f"{tag:.80}: {len(content)} bytes are not {list(shape)[:16]} of {kind}")
    values = torch.frombuffer(content, dtype=TYPES[kind]) if content else torch.empty(0, dtype=TYPES[kind])
    return values.reshape(shape)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a protobuf message (https://protobuf.dev/programming-guides/encoding)."""
    cursor = Cursor(data)
    while cursor:
        key = varint(cursor.byte)
        if key & 7 == 0:
            yield key >> 3, varint(cursor.byte)
        elif key & 7 == 2:
            yield key >> 3, cursor.take(varint(cursor.byte))
        else:
            raise ValueError(f"a field of wire type {key & 7}")


def _varints(data: memoryview) -> Iterator[int]:
    cursor = Cursor(data)
    while cursor:
        yield varint(cursor.byte)


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where bytes should be")
    return value


def ckpt_of(state: Mapping[str, Tensor]) -> bytes:
    """The content of a .ckpt file with the tensors of `state`. SwinQuantError for a type that MindSpore lacks."""
    return b"".join(_field(1, _field(1, name.encode()) + _field(2, _message(name, x))) for name, x in state.items())


def _message(name: str, x: Tensor) -> bytes:
    if x.dtype not in _TYPE_NAMES:
        raise SwinQuantError(f"{name}: is of type {x.dtype}, which MindSpore has not")
    content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    dims = b"".join(b"\x08" + _encoded_varint(size) for size in (x.shape or (0,)))
    return dims + _field(2, _TYPE_NAMES[x.dtype].encode()) + _field(3, content)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _encoded_varint(len(content)) + content


def _encoded_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
