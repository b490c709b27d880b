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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swin_quant.base import pickled
from swin_quant.base.errors import SwinQuantError, first_line, listed
from swin_quant.base.files import open_plain
from swin_quant.base.pickled import Malformed, Opaque
from swin_quant.base.reading import ENCRYPTED, opened, reads

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
    r"(numpy|pathlib|datetime|zoneinfo|random|decimal|fractions|uuid|typing|collections|omegaconf|ml_collections|"
    r"easydict|addict|mmengine|torch\.nn\.modules\.(normalization|activation))\.[\w.]+|functools\.partial|"
    r"types\.SimpleNamespace|(builtins|__builtin__)\.(int|float|str|bool|list|dict|tuple|bytes|complex|slice|range|"
    r"xrange|object|set|frozenset|long|unicode)|copyreg\._reconstructor|copy_reg\._reconstructor|"
    r"torch\.torch_version\.TorchVersion|torch\._C\.Generator|torch\.Generator"
)


# detectron2's converters pickle NumPy arrays.
_PICKLE_PROBLEM = (
    "is a pickle that torch.save did not write: if you trust it, run `import pickle, torch; "
    "s = pickle.load(open('IN.pkl', 'rb')); "
    "torch.save({k: torch.as_tensor(v) for k, v in s.get('model', s).items()}, 'OUT.pth')`"
)


@reads("checkpoint")
def read_pickled(path: Path) -> Any:
    """The content of a torch.save file, as plain data and tensors on the CPU.

    Raises:
        SwinQuantError: any other file, described in one line; names of code in it are never imported.
    """
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

    content, problem = None, ""
    module: Any = SimpleNamespace(__name__=__name__, Unpickler=Reader, load=lambda file, **_: Reader(file).load())
    with open_plain(path) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
        file.seek(0)
        try:
            if is_zip:
                _check_zip(file, path)
            elif tarfile.is_tarfile(file):  # torch would unpack it to a folder
                raise Malformed("it is a tar archive")
            file.seek(0)
            forced = os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)  # refuses every reader but torch's own
            try:
                content = torch.load(file, "cpu", weights_only=False, pickle_module=module, mmap=False)
            finally:
                os.environ.update({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": forced} if forced else {})
        except (SwinQuantError, OSError, MemoryError):
            raise
        except Exception as error:
            what = f"is cut short or damaged, or torch.save did not write it ({first_line(error, 120)})"
            problem = _PICKLE_PROBLEM if path.suffix in (".pkl", ".pickle") else f"{what}: download or copy it again"
    if foreign:
        suspects = sorted(foreign, key=lambda name: name.startswith(("torch.", "collections.")))
        names = listed((f"{name!r:.100}" for name in suspects), 2)
        problem = f"asks for {names}, which could run code, and was refused: save torch.save(model.state_dict(), FILE)"
    if problem:
        raise SwinQuantError(f"{path}: {problem}")
    return content


def _check_zip(file: io.BufferedReader, path: Path) -> None:
    """Malformed or SwinQuantError unless the members of a zip are its own bytes, each once, undamaged.

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
        raise SwinQuantError(f"{path}: is a TorchScript archive, which is code: save the model's state_dict instead")
    kinds = {(one.compress_type, one.flag_bits & ENCRYPTED, one.compress_size - one.file_size) for one in members}
    if kinds - {(zipfile.ZIP_STORED, 0, 0)}:
        raise SwinQuantError(f"{path}: is a compressed zip file, not a checkpoint: unpack it first")
    if len(archive.NameToInfo) < len(members) or sum(member.file_size for member in members) > size:
        raise Malformed("two members in one place")
    if any(member.filename.endswith(".pkl") and member.file_size > _MAX_PICKLE for member in members):
        holds = "holds its numbers in its pickle, as NumPy arrays do"
        raise SwinQuantError(f"{path}: {holds}: save tensors instead (torch.from_numpy)")
    if damaged := archive.testzip():  # torch ignores the checksums in its own files
        raise Malformed(f"Bad CRC-32 for file {damaged!r:.100}")


def _tensor(storage: Any, offset: int, size: Shape, stride: Shape, *more: Any) -> Tensor | Opaque:
    """A view of a storage, after its bounds are checked: torch would make a storage larger."""
    dtype = more[2] if len(more) > 2 and isinstance(more[2], torch.dtype) else storage.dtype
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
