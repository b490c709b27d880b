"""Read files of torch.save, zip or legacy: plain data, and tensors over the bytes in the file.

torch reads the containers, our unpickler the pickles in them. The pickle gives a tensor's type, shape and strides; the
bytes in the file bound its memory. A view of more elements than are stored becomes an Opaque that describes it, as does
a tensor that is not dense. Members of a zip are never unpacked, and its directory ends where the file ends, so that no
two readers find different ones.
"""

import io
import math
import os
import re
import struct
import tarfile
import zipfile
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swin_quant.base import pickled
from swin_quant.base.errors import first_line
from swin_quant.base.pickled import Malformed, Opaque
from swin_quant.base.reading import ENCRYPTED, opened

Shape: TypeAlias = tuple[int, ...]
_ZIP = b"PK\x03\x04"
_MAX_PICKLE, _MAX_DIRECTORY = 16 << 20, 4 << 20
# The end of a zip: record and locator of Zip64, then the record of 22 bytes (PKWARE's APPNOTE, 4.3.14 to 4.3.16);
# signatures, and of each record the size and offset of the directory.
_ENDS = struct.Struct("<4s36x2Q 4s16x 4s8x2LH")
MAX_DIMENSIONS = 64  # torch's limit

TYPES = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    + (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
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


def read_torch(file: io.BufferedReader) -> Any:
    """The content of a file of torch.save, tensors on the CPU. Raises a ValueError, Foreign, Script,
    Compressed or Bulky."""
    foreign: dict[str, None] = {}  # names of other code

    class Reader(pickled.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            name = f"{module}.{name}"
            known = _KNOWN.get(name, getattr(torch, name.removeprefix("torch."), None))
            if name in _KNOWN or isinstance(known, torch.dtype):
                return known
            if not any(kind.fullmatch(name) for kind in (_OPAQUE, _HARMLESS)):
                foreign[name] = None
            return lambda *arguments: Opaque(name, bool(_REBUILT.fullmatch(name)))

    module: Any = SimpleNamespace(__name__=__name__, Unpickler=Reader, load=lambda file, **_: Reader(file).load())
    is_zip = file.read(len(_ZIP)) == _ZIP
    file.seek(0)
    try:
        if is_zip:
            _check_zip(file)
        elif tarfile.is_tarfile(file):  # torch would unpack it to a folder
            raise Malformed("it is a tar archive")
        file.seek(0)
        content = torch.load(file, "cpu", weights_only=False, pickle_module=module, mmap=False)
    except (Script, Compressed, Bulky, OSError, MemoryError):
        raise
    except Exception as error:
        if not foreign:
            raise error if isinstance(error, ValueError) else Malformed(first_line(error, 120)) from error
    if foreign:
        raise Foreign(foreign)
    return content


def _check_zip(file: io.BufferedReader) -> None:
    """ValueError, Script, Compressed or Bulky unless the members of a zip are its own bytes, each once, undamaged.

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
    if any(member.filename.endswith(".pkl") and member.file_size > _MAX_PICKLE for member in members):
        raise Bulky
    if damaged := archive.testzip():  # torch ignores the checksums in its own files
        raise Malformed(f"Bad CRC-32 for file {damaged!r:.100}")


def _tensor(
    storage: Any,
    offset: int,
    size: Shape,
    stride: Shape,
    grad: Any = None,
    hooks: Any = None,
    dtype: Any = None,
    *_: Any,
) -> Tensor | Opaque:
    """A view of a storage, after its bounds are checked: torch would make a storage larger."""
    dtype = dtype if isinstance(dtype, torch.dtype) else storage.dtype  # version 2 has other data in its place
    natural = all(type(n) is int and n >= 0 for n in (offset, *size, *stride))
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS or not natural:
        raise Malformed("a tensor of no shape")
    data = storage._untyped_storage
    stored, wanted = data.nbytes() // dtype.itemsize, math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if wanted else offset - 1
    if last >= stored:
        raise Malformed("a tensor beyond its storage")
    if wanted > stored:
        return Opaque(f"a view {list(size)} of {stored} stored values", is_tensor=True)
    try:
        return torch.empty(0, dtype=dtype).set_(data, min(offset, stored), size, stride)
    except (RuntimeError, OverflowError, TypeError) as error:  # numbers beyond 64 bits
        raise Malformed("a tensor of no shape") from error


def _with_attributes(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor with attributes. Nested calls are refused: their depth could equal the file's length."""
    if rebuild is _with_attributes or not isinstance(arguments, tuple):
        raise Malformed("a tensor that is none")
    return rebuild(*arguments)


_KNOWN: dict[str, Any] = {
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Size": lambda sizes=(): tuple(pickled.items(sizes)),
    # Classes of training configurations and counters, read as plain dictionaries that are never used.
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "yacs.config.CfgNode"), pickled.mapping),
    "argparse.Namespace": lambda: pickled.Attributes(),
    "collections.defaultdict": lambda factory=None, *pairs: pickled.mapping(*pairs),
    **dict.fromkeys(("builtins.set", "__builtin__.set"), pickled.items),
    "_codecs.encode": lambda text, *rest: text,
    "torch.storage.UntypedStorage": torch.UntypedStorage,
}
