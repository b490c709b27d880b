"""Read the tensors of a weights file that somebody else wrote, without running any code in it."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.base.errors import SwinQuantError, first_line, listed
from swin_quant.base.files import compute_sha256, list_parts, open_plain, require_file, resolve_path
from swin_quant.base.pickled import Opaque
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.cards.records import SourceRecord
from swin_quant.checkpoint.mindspore import read_ckpt
from swin_quant.checkpoint.roots import choose_set, is_tensor, sets_in
from swin_quant.checkpoint.torch_file import MAX_DIMENSIONS, TYPES, read_pickled

_SNIFFED = 512  # bytes
_LONGEST_KEY = 512  # characters
_MAX_HEADER = 4 << 20  # bytes of names and shapes in a safetensors file
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"

# Files that a failed download leaves under a checkpoint's name: first bytes in lower case -> what it is, the remedy.
_NOT_WEIGHTS = (
    (rb"\s*<(!doctype|html|head|\?xml)", "is a web page: open its address in a browser and download the file itself"),
    (rb"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull` to get the file it stands for"),
    (rb"[\t\r\n\x20-\x7e]+\Z", "is a text file, not a checkpoint"),
)

VERSIONS = "versions"  # in a source's notes: {module: its version}, of a state_dict that tells them
_NOTES = ("config", "args", "arch")  # keys by which training scripts name the model, beside the weights


@dataclass(frozen=True)
class Source:
    """The origin of weights.

    Attributes:
        format: the container, and the convention of names.
        notes: plain data beside the tensors, unchecked.
        weights: the name of the set of weights that was read, of `several` in the file.
    """

    path: Path
    sha256: str
    format: str
    calibrated: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    weights: str = ""
    several: bool = False

    def record(self) -> SourceRecord:
        """The `source` section of a run card."""
        path = str(resolve_path(self.path))
        record: SourceRecord = {"file": self.path.name, "sha256": self.sha256, "format": self.format, "path": path}
        return record | {"weights": self.weights} if self.several else record


@reads("checkpoint")
def read_state_dict(
    path: str | os.PathLike[str], weights: str = "", get_hash: Callable[[Path], str] = compute_sha256
) -> tuple[dict[str, Tensor], Source]:
    """The tensors of a .pth, .safetensors or MindSpore .ckpt file, by the names in it, on the CPU, in their own types.

    A .pth may be a bare state_dict or nest one, or several, beside an optimizer, an epoch, a configuration; `weights`
    chooses as in `roots`. Errors (one line each): no such file, a directory, empty, a web page or text, cut short or
    damaged (checksums included), code or foreign classes (never executed), no tensors, an entry that is not dense.
    Where `path` is an index, the tensors are those of the files that it names. `get_hash`: gives the hash of the file.
    """
    path = Path(path)
    if path.is_file() and (parts := list_parts(path)):
        return _read_parts(path, parts, get_hash)
    require_file(path, "checkpoint")
    with open_plain(path) as file:
        head = file.read(_SNIFFED)
    if not head:
        raise SwinQuantError(f"{path}: is empty (0 bytes): download or copy it again")
    for pattern, advice in _NOT_WEIGHTS:
        if re.match(pattern, head.lower()):
            raise SwinQuantError(f"{path}: {advice}")
    notes: dict[str, Any] = {}
    content: Any
    if path.suffix == ".ckpt" and head[:1] == b"\x0a":  # MindSpore's; torch's zip files may end in .ckpt, too
        kind, content = "ckpt", read_ckpt(path)
    # The hub's cache names files by their hash: they are known by their header
    elif path.suffix == ".safetensors" or (head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER):
        kind, (content, notes["metadata"]) = "safetensors", _read_safetensors(path, head)
    elif head.startswith((_ZIP, _PICKLE)):
        kind, content = "pth", read_pickled(path)
    else:
        raise SwinQuantError(f"{path}: is not a checkpoint: torch.save did not write it")
    return choose_state(content, Source(path, get_hash(path), kind, notes=notes), weights)


def _read_parts(
    index: Path, parts: Mapping[Path, list[str]], get_hash: Callable[[Path], str]
) -> tuple[dict[str, Tensor], Source]:
    if absent := [part.name for part in parts if not part.is_file()]:
        raise SwinQuantError(f"{index}: names {listed(absent, 3)}, which must lie beside it: download or copy it, too")
    found: dict[str, Tensor] = {}
    for part, keys in parts.items():
        state, source = read_state_dict(part)
        if unlike := {*keys} ^ state.keys():
            raise SwinQuantError(f"{part}: holds other tensors than {index.name} says: {listed(sorted(unlike), 3)}")
        found |= state
    return found, replace(source, path=index, sha256=get_hash(index))


def _read_safetensors(path: Path, head: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    from safetensors import safe_open

    if len(head) < 8 or int.from_bytes(head[:8], "little") > _MAX_HEADER:
        raise SwinQuantError(f"{path}: is cut short or not a safetensors file (its header is too large)")
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except Exception as error:  # SafetensorError, and torch's errors for types and shapes that it lacks
        raise SwinQuantError(f"{path}: is cut short or not a safetensors file ({first_line(error, 160)})") from error


def choose_state(content: Any, source: Source, weights: str = "") -> tuple[dict[str, Tensor], Source]:
    """The tensors of the set in a file's content that is the model, and `source` with its name and the notes beside."""
    path = source.path
    if not isinstance(content, Mapping):
        raise SwinQuantError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    sets = sets_in(content)
    if not sets:
        keys = listed(f"{key!r:.80}" for key in content) or "none"
        found = "no state_dict, though there are tensors in it" if _has_tensor(content) else "no tensors"
        raise SwinQuantError(f"{path}: holds {found} (keys: {keys}): a state_dict is expected, bare or under a key")
    tensors = {name: {key: x for key, x in each.items() if isinstance(x, Tensor)} for name, each in sets.items()}
    name, _ = choose_set(path, tensors, weights, last=False)
    state = sets[name]
    for key, value in state.items():
        if not isinstance(key, str) or not key.isprintable() or len(key) > _LONGEST_KEY:
            raise SwinQuantError(f"{path}: {key!r:.80} is not the name of a tensor")
        usual = isinstance(value, Tensor) and value.dtype in TYPES.values() and value.dim() <= MAX_DIMENSIONS
        if is_tensor(value) and not usual:
            kind = value.what if isinstance(value, Opaque) else f"a tensor of {value.dtype}, {value.dim()} dimensions"
            raise SwinQuantError(f"{path}: entry {key} is not a dense tensor of a common type but {kind:.160}")
    beside = [key for key, value in state.items() if not isinstance(value, Tensor | Mapping)]
    if name and beside:
        log.info("%s: no tensors, left out: %s", path, listed(beside, 3))
    notes = dict(source.notes)
    for part in (content, *filter(lambda value: isinstance(value, Mapping), content.values())):  # or one level deeper
        notes |= {key: part[key] for key in _NOTES if key not in notes and isinstance(part.get(key), Mapping | str)}
        notes |= {VERSIONS: part.versions} if hasattr(part, VERSIONS) else {}
    return tensors[name], replace(source, notes=notes, weights=name, several=len(sets) > 1)


def _has_tensor(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return is_tensor(value) or any(map(_has_tensor, inside))
