"""Read files of torch.save, zip or legacy: plain data, and tensors over the bytes in the file.

The pickle gives a tensor's type, shape and strides; the bytes in the file bound its memory. A view of more elements
than are stored becomes an Opaque that describes it, as does a tensor that is not dense or of no common type. Members
of a zip are never unpacked, and its directory ends where the file ends, so that no two readers find different ones.
"""

import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swin_quant.base import pickled
from swin_quant.base.pickled import Known, Malformed, Opaque
from swin_quant.base.reading import ENCRYPTED, opened, unpacked

Shape: TypeAlias = tuple[int, ...]
Find: TypeAlias = Callable[[str], Known]  # the stand-in for a name in a pickle
_ZIP = b"PK\x03\x04"
_LEGACY, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # torch/serialization.py, before version 1.6
_MAX_PICKLE, _MAX_DIRECTORY = 16 << 20, 4 << 20
# The end of a zip: record and locator of Zip64, then the record of 22 bytes (PKWARE's APPNOTE, 4.3.14 to 4.3.16);
# signatures, and of each record the size and offset of the directory.
_ENDS = struct.Struct("<4s36x2Q 4s16x 4s8x2LH")
MAX_DIMENSIONS = 64  # torch's limit

_STORAGES: dict[str, torch.dtype] = {
    **{name: getattr(torch, name.lower()) for name in "Double Float Half BFloat16 Long Int Short Bool".split()},
    "Char": torch.int8,
    "Byte": torch.uint8,
}
TYPES = {str(dtype): dtype for dtype in _STORAGES.values()}
_WIDTHS = {"ComplexFloat": 8, "ComplexDouble": 16, "QUInt8": 1, "QInt8": 1, "QInt32": 4, "Untyped": 1}
_STORAGE = re.compile(r"torch\.(?:storage\.)?(\w+)Storage")
# Harmless names that build no dense tensor: sparse and quantized tensors, other devices, types, layouts.
_OPAQUE = re.compile(
    r"torch\.(_utils\._rebuild_\w+|_tensor\._rebuild_\w+|serialization\._get_layout|device|Tensor|nn\.parameter\.\w+|"
    r"per_\w+_affine\w*|u?int\d+|float\d+\w*|bfloat16|complex\d+|bool|q\w+)"
)
_REBUILT = re.compile(r"torch\.(_utils|_tensor)\._rebuild_\w+")
# Names of values that trainers leave beside the weights: numbers, dates, paths, settings. Nothing here reads them.
_HARMLESS = re.compile(
    r"numpy\.(_?core\.(multiarray|numeric)\._?(reconstruct|scalar|frombuffer)|ndarray|dtype|dtypes\.\w+|"
    r"(u?int|float|complex|bool|str|bytes|void|datetime|timedelta)\w*|random\._pickle\.\w+|random\.\w+\.\w+|"
    r"random\.(mtrand\.)?(RandomState|Generator|SeedSequence|MT19937|PCG64))|"
    r"pathlib(\._local)?\.\w*(Path|PosixPath|WindowsPath)|datetime\.\w+|zoneinfo\.\w+|functools\.partial|"
    r"collections\.(deque|ChainMap|UserDict|UserList)|types\.SimpleNamespace|decimal\.Decimal|fractions\.Fraction|"
    r"uuid\.\w+|(builtins|__builtin__)\.(int|float|str|bool|list|dict|tuple|bytes|complex|slice|range|xrange|object|"
    r"set|frozenset|long|unicode)|copyreg\._reconstructor|copy_reg\._reconstructor|random\.Random|"
    r"torch\.nn\.modules\.(normalization|activation)\.\w+|torch\.torch_version\.TorchVersion|"
    r"torch\._C\.Generator|torch\.Generator|"
    r"omegaconf\.[\w.]+|ml_collections\.[\w.]+|easydict\.EasyDict|addict\.[\w.]+|mmengine\.[\w.]*(History|Config)\w*|"
    r"typing\.\w+"
)


class Foreign(Exception):
    """The pickle asks for classes or functions that torch.save does not write: `names`, suspects first."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = sorted(names, key=lambda name: name.startswith(("torch.", "collections.")))


class Script(Exception):
    """A TorchScript archive, which is code."""


class Compressed(Exception):
    """A zip with a member that is packed or encrypted."""


class Bulky(Exception):
    """A pickle of many megabytes, as one with the numbers of NumPy's arrays is."""


@dataclass(frozen=True)
class _Storage:
    """Bytes, as a tensor [n] uint8, and the name of their type."""

    data: Tensor
    name: str

    @property
    def dtype(self) -> torch.dtype | None:
        return _STORAGES.get(self.name)


def read_torch(file: io.BufferedReader) -> Any:
    """The content of a file of torch.save, tensors on the CPU. Raises a ValueError, Foreign, Script,
    Compressed or Bulky."""
    head = file.read(len(_ZIP))
    file.seek(0)
    foreign: dict[str, None] = {}  # names of other code

    def find(name: str) -> Known:
        if name not in _KNOWN and not any(kind.fullmatch(name) for kind in (_STORAGE, _OPAQUE, _HARMLESS)):
            foreign[name] = None
        is_tensor = bool(_REBUILT.fullmatch(name))
        return Known(name, _KNOWN.get(name) or (lambda *arguments: Opaque(name, is_tensor)))

    try:
        content = _read_zip(file, find) if head == _ZIP else _read_legacy(file, find)
    except ValueError:
        if not foreign:
            raise
    if foreign:
        raise Foreign(foreign)
    return content


def _read_zip(file: io.BufferedReader, find: Find) -> Any:
    archive = _stored(file)
    members = archive.NameToInfo
    root = next((name.removesuffix("data.pkl") for name in members if re.fullmatch(r"[^/]*/data\.pkl", name)), None)
    if root is None:
        raise Malformed("no data.pkl")
    if members[f"{root}data.pkl"].file_size > _MAX_PICKLE:
        raise Bulky
    unread = dict.fromkeys(members)

    def content(name: str) -> bytes:
        unread.pop(name, None)
        return unpacked(archive, name, archive.getinfo(name).file_size)

    def fetch(kind: str, key: str, size: int) -> _Storage:
        stored = content(f"{root}data/{key}")
        if len(stored) != size:
            raise Malformed(f"storage {key} is of {len(stored)} bytes, not {size}")
        data = torch.empty(size, dtype=torch.uint8)
        data.numpy().data[:] = stored
        return _Storage(data, kind)

    if f"{root}byteorder" in unread and content(f"{root}byteorder") != b"little":
        raise Malformed("its numbers are big-endian")
    found = pickled.load(io.BytesIO(content(f"{root}data.pkl")), find, _storages(fetch))
    for name in [*unread]:  # torch ignores the checksums in its own files
        content(name)
    return found


def _stored(file: io.BufferedReader) -> zipfile.ZipFile:
    """The zip `file`, whose members are its own bytes, each once. ValueError, Script or Compressed for any other.

    A directory of a bounded size must lie right before the end record, or before the Zip64 one.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - _ENDS.size))
    of64, length64, start64, locator, of32, length, start, comment = _ENDS.unpack(file.read().rjust(_ENDS.size))
    if of32 != b"PK\x05\x06" or comment:
        raise Malformed("no end record at the end")
    end = size - 22
    if (of64, locator) == (b"PK\x06\x06", b"PK\x06\x07"):
        end, length, start = size - _ENDS.size, length64, start64
    if start + length != end or length > _MAX_DIRECTORY:
        raise Malformed("its directory is not before its end")
    archive = opened(file)
    members = archive.infolist()
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise Script
    kinds = {(one.compress_type, one.flag_bits & ENCRYPTED, one.compress_size - one.file_size) for one in members}
    if kinds - {(zipfile.ZIP_STORED, 0, 0)}:
        raise Compressed
    if len(archive.NameToInfo) < len(members) or sum(member.file_size for member in members) > size:
        raise Malformed("two members in one place")
    return archive


def _read_legacy(file: io.BufferedReader, find: Find) -> Any:
    """Five pickles (mark, protocol, system, content, keys of storages), then each storage: elements, bytes."""
    left = os.fstat(file.fileno()).st_size
    stream = io.BytesIO(file.read(_MAX_PICKLE))
    storages: dict[str, _Storage] = {}

    def reserve(name: str, key: str, size: int) -> _Storage:
        nonlocal left
        left -= size
        if left < 0:
            raise Malformed("its storages are larger than the file")
        storages[key] = _Storage(torch.empty(size, dtype=torch.uint8), name)
        return storages[key]

    mark = pickled.load(stream, find)
    if mark != _LEGACY or pickled.load(stream, find) != _PROTOCOL:
        raise Malformed("torch.save did not write it")
    system = pickled.load(stream, find)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Malformed("its numbers are big-endian")
    content, keys = pickled.load(stream, find, _storages(reserve)), pickled.load(stream, find)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(storages):
        raise Malformed("the keys of its storages are others")
    file.seek(stream.tell())
    for key in keys:
        data, width = storages[key].data, _width(storages[key].name)
        header = file.read(8)
        fits = len(header) == 8 and struct.unpack("<q", header)[0] * width == len(data)
        if not fits or file.readinto(data.numpy().data) != len(data):
            raise Malformed(f"storage {key} is cut short")
    return content


def _storages(fetch: Callable[[str, str, int], _Storage]) -> Callable[[Any], Any]:
    """The reader of persistent ids, ('storage', type, key, device, elements[, view]); each storage is fetched once.

    Files from before torch 1.6 also name classes of modules this way: ('module', class, file, source).
    """
    found: dict[str, _Storage] = {}

    def find(identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
            return identity[1]
        kind, known, key, _, elements, *view = identity
        match = _STORAGE.fullmatch(known.name)
        is_valid = kind == "storage" and isinstance(key, str) and type(elements) is int and elements >= 0
        if match is None or not is_valid or any(view):
            raise Malformed("an id of no storage")
        name, size = match[1], elements * _width(match[1])
        if key not in found:
            found[key] = fetch(name, key, size)
        if found[key].name != name or len(found[key].data) != size:
            raise Malformed(f"storage {key} is of two types")
        return found[key]

    return find


def _width(name: str) -> int:
    return _STORAGES[name].itemsize if name in _STORAGES else _WIDTHS[name]


def _tensor(storage: _Storage | Opaque, offset: int, size: Shape, stride: Shape, *rest: Any) -> Tensor | Opaque:
    return storage if isinstance(storage, Opaque) else _view(storage, storage.dtype, storage.name, offset, size, stride)


def _view(
    storage: _Storage, dtype: torch.dtype | None, name: str, offset: int, size: Shape, stride: Shape
) -> Tensor | Opaque:
    natural = all(type(n) is int and n >= 0 for n in (offset, *size, *stride))
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS or not natural:
        raise Malformed("a tensor of no shape")
    if dtype is None:
        return Opaque(f"a tensor of {name}", is_tensor=True)
    stored, wanted = len(storage.data) // dtype.itemsize, math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if wanted else offset - 1
    if last >= stored:
        raise Malformed("a tensor beyond its storage")
    if wanted > stored:
        return Opaque(f"a view {list(size)} of {stored} stored values", is_tensor=True)
    try:
        return storage.data[: stored * dtype.itemsize].view(dtype).as_strided(size, stride, min(offset, stored))
    except (RuntimeError, OverflowError, TypeError) as error:  # numbers beyond 64 bits
        raise Malformed("a tensor of no shape") from error


def _with_attributes(rebuild: Known, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor with attributes. Nested calls are refused: their depth could equal the file's length."""
    if rebuild.make is _with_attributes or not isinstance(arguments, tuple):
        raise Malformed("a tensor that is none")
    return rebuild.make(*arguments)


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda storage, offset, size, stride, grad, hooks, dtype, *rest: _view(
        storage, TYPES.get(dtype.name), dtype.name, offset, size, stride
    ),
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": lambda sizes=(): tuple(pickled.items(sizes)),
    # Classes of training configurations and counters, read as plain dictionaries that are never used.
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "yacs.config.CfgNode"), pickled.mapping),
    "argparse.Namespace": pickled.Attributes,
    "collections.defaultdict": lambda factory=None, *pairs: pickled.mapping(*pairs),
    **dict.fromkeys(("builtins.set", "__builtin__.set"), pickled.items),
    "_codecs.encode": lambda text, *rest: text,
}
