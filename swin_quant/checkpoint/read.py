"""Reading the tensors of a weights file that somebody else wrote, without running anything it holds."""

import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.errors import SwinQuantError, listed
from swin_quant.files import reason, sha256_of

_SNIFFED = 512  # bytes
_LONGEST_KEY = 512  # characters
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"

# What a failed download leaves under a checkpoint's name: its first bytes in lower case -> what it is, what to do.
_NOT_WEIGHTS = (
    (rb"\s*<(!doctype|html|head|\?xml)", "is a web page: open its address in a browser and download the file itself"),
    (rb"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull` to get the file it stands for"),
    (rb"[\t\r\n\x20-\x7e]+\Z", "is a text file, not a checkpoint"),
)

# Microsoft's and FasterTransformer's files carry the training configuration beside the weights. These classes become
# plain dictionaries that nobody reads: torch's safe unpickler cannot fill a dict subclass, and no code of theirs runs.
_INERT = [(OrderedDict, name) for name in ("yacs.config.CfgNode", "argparse.Namespace")]

_WRAPPERS = ("model", "state_dict")


@dataclass(frozen=True)
class Source:
    """Where weights came from: the file, the SHA-256 of its bytes, its container, its convention of names, and
    whether it holds ranges."""

    path: Path
    sha256: str
    format: str
    calibrated: bool = False

    def record(self) -> dict[str, str]:
        """The `source` section of a run card: the bare file name, since a card travels between machines."""
        return {"file": self.path.name, "sha256": self.sha256, "format": self.format}


def read_state_dict(path: str | os.PathLike) -> tuple[dict[str, Tensor], Source]:
    """The tensors of a .pth or .safetensors file, by the names in the file, on the CPU, in their own types.

    A .pth may be a bare state_dict or hold one under `model` or `state_dict`, beside an optimizer, an epoch, a yacs
    configuration. Errors (one line each): no such file, a directory, empty, a web page or text, cut short or damaged
    (checksums included), code or foreign classes (never executed), no tensors, an entry that is not a dense tensor.
    """
    path = Path(path)
    head = _sniff(path)
    is_safetensors = path.suffix == ".safetensors"
    content = _read_safetensors(path) if is_safetensors else _read_torch(path, head)
    state = _unwrap(path, content)
    return state, Source(path, sha256_of(path), "safetensors" if is_safetensors else "pth")


def _sniff(path: Path) -> bytes:
    if not path.exists():
        raise SwinQuantError(f"{path}: no such checkpoint")
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise SwinQuantError(f"{path}: is {kind}: give the checkpoint file")
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED)
    except OSError as error:
        raise SwinQuantError(f"{path}: the checkpoint cannot be read: {reason(error)}") from error
    if not head:
        raise SwinQuantError(f"{path}: is empty (0 bytes): download or copy it again")
    for pattern, advice in _NOT_WEIGHTS:
        if re.match(pattern, head.lower()):
            raise SwinQuantError(f"{path}: {advice}")
    return head


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise SwinQuantError(f"{path}: is cut short or not a safetensors file ({_first_line(error)})") from error


def _read_torch(path: Path, head: bytes) -> Any:
    if head.startswith(_ZIP):
        _check_zip(path)
    elif not head.startswith(_PICKLE):
        raise SwinQuantError(f"{path}: is not a checkpoint: torch.save did not write it")
    try:
        with torch.serialization.safe_globals(_INERT), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of ends in the error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes make the unpickler fail in any way there is
        if names := _foreign(path, error):
            message = f"asks for {names}, which could run code, and was refused: save only the model's state_dict"
        elif "TorchScript" in str(error):
            message = "is a TorchScript archive, which is code: save the model's state_dict instead"
        else:
            message = "is cut short or damaged, or torch.save did not write it: download or copy it again"
        raise SwinQuantError(f"{path}: {message}") from error


def _check_zip(path: Path) -> None:
    """torch ignores the checksums in its own files, so that a flipped bit would pass as a weight."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save never compresses: what unpacks to more than its own size is a bomb, or a zipped checkpoint.
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise SwinQuantError(f"{path}: is a compressed zip file, not a checkpoint: unpack it first")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise SwinQuantError(f"{path}: is cut short or damaged: download or copy it again") from error
    if damaged:
        raise SwinQuantError(f"{path}: is damaged: the checksum of {damaged} is wrong: download or copy it again")


def _foreign(path: Path, error: Exception) -> str:
    """The classes and functions that a refused pickle asks for, suspects first; empty when it was not for them."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"{match[1]!r:.100}"
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    strings: list[str] = []  # of the pickle protocols above torch's own, where names lie on the stack
    names: dict[str, None] = {}
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_in(path)):
            if opcode.name == "STACK_GLOBAL":
                names[".".join(strings[-2:])] = None
            elif isinstance(argument, str):
                strings.append(argument)
    except Exception:
        return ""  # cut short: then that is the message
    suspects_first = sorted(names, key=lambda name: name.startswith(("torch.", "collections.")))
    return listed(f"{name!r:.100}" for name in suspects_first)


def _pickle_in(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _unwrap(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise SwinQuantError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    state = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not any(isinstance(value, Tensor) for value in state.values()):
        keys = listed(f"{key!r:.80}" for key in state) or "none"
        raise SwinQuantError(
            f"{path}: holds no tensors (keys: {keys}): a state_dict is expected, bare or under `model` or `state_dict`"
        )
    for key, value in state.items():
        if not isinstance(key, str) or not key.isprintable() or len(key) > _LONGEST_KEY:
            raise SwinQuantError(f"{path}: {key!r:.80} is not the name of a tensor")
        if not _is_dense(value):
            raise SwinQuantError(f"{path}: entry {key} is not a dense tensor but {_kind(value)}")
    return {key: value.detach() for key, value in state.items()}


def _is_dense(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device.type == "cpu"


def _kind(value: Any) -> str:
    return f"{value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
