"""Files that are whole or absent: atomic writes, hashes, and JSON that is bounded and finite; files of the package."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import mimetypes
import os
import re
import secrets
import stat
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, UsageError, did_you_mean, listed

MAX_JSON_BYTES = 32 * 1024 * 1024
_MAX_LINES_BYTES = 4 * 1024 * 1024  # three times ImageNet-22k's descriptions
INDEX = ".index.json"
"""End of the name of an index: a file that names, for each tensor, the file beside it that holds the tensor."""
_MOST_PARTS = 1024
_MAX_JSON_VALUES = 2**20  # an empty list is 3 bytes in the file and 64 in memory

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it is larger than the limit on the size of a file",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOTDIR: "a part of its path is a file, not a directory",
    errno.EIO: "the disk reports an error",
}


def reason(error: OSError) -> str:
    """An operating system's error in words."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def near(path: str | os.PathLike[str]) -> str:
    """The end of a message about a missing `path`: the name in its folder that was meant, or nothing."""
    folder, name = os.path.split(os.fspath(path).rstrip(os.sep))
    try:
        there, (stem, kind) = [one for one in os.listdir(folder or os.curdir) if one != name], os.path.splitext(name)
        alike = {os.path.splitext(one)[0]: one for one in there if os.path.splitext(one)[1] == kind}
        if meant := get_close_matches(stem, alike, n=1):  # a card is no artifact; the same ending is no likeness
            return f"; did you mean {alike[meant[0]]}?"
        start = name[: name.rfind(".") + 1]
        return "" if alike else did_you_mean(name, [one for one in there if one.startswith(start)])
    except (OSError, ValueError):
        return ""


def open_plain(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read its bytes.

    OSError for all else under that name: a pipe would wait for a writer for ever, a device may have no end.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # a NUL, or characters that no file system can hold
        raise OSError(errno.EINVAL, "no file can have this name") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def require_file(path: str | os.PathLike[str], what: str) -> None:
    """SwinQuantError unless `path` is a regular file; `what` names its kind, e.g. "checkpoint". UsageError for the name
    of a picture, which was given in the place of that file."""
    if (mimetypes.guess_type(str(path))[0] or "").startswith("image/"):
        raise UsageError(f"{path}: is a picture: name the {what} first")
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, ValueError) as error:  # ValueError: no file can have this name
        due = f": give a {what} file, a folder of Hugging Face, or timm:NAME" if "checkpoint" in what else ""
        raise SwinQuantError(f"{path or repr(path)}: no such {what}{near(path) or due}") from error
    except OSError as error:
        raise SwinQuantError(f"{path}: the {what} cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(mode):
        if any(os.path.isdir(os.path.join(path, split)) for split in ("train", "val")):
            raise UsageError(f"{path}: is a folder of pictures: give the {what} file in its place")
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise SwinQuantError(f"{path}: is {kind}: give the {what} file")


def ensure_writable_dir(path: str | os.PathLike[str], *, keep: bool = True) -> Path:
    """Create the directory `path` (all its levels) and write a probe into it: before long work, not after it.

    `keep`: False removes the directories that were created, so that an error of the work leaves none.
    """
    path = Path(path)
    probe = path / f".{secrets.token_hex(8)}.tmp"
    try:
        new = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process is writing there
            for one in [] if keep else new:
                one.rmdir()
    except FileExistsError as error:
        raise SwinQuantError(f"{path}: cannot be the output directory: it is a file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise SwinQuantError(f"{path}: cannot be the output directory: {why}") from error
    return path


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise where `atomic_write_bytes` would: before long work, not after it. Nothing is written."""
    target = _resolve_target(path)
    if not os.access(target.parent, os.W_OK):
        raise SwinQuantError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")


def _resolve_target(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "not a regular file"
        raise SwinQuantError(f"{path}: cannot be written: it is {kind}")
    if not target.parent.is_dir():
        raise SwinQuantError(f"{path}: cannot be written: the directory {target.parent} does not exist")
    return target


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write `data` to `path`, or leave `path` as it was: a temporary file beside it, fsync, then rename.

    After an interruption (a full disk, Ctrl-C) the old file is untouched and the temporary one removed. A link is
    followed, so that it still points to its file afterwards. Errors name `path` and the reason.
    """
    target = _resolve_target(path)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise SwinQuantError(f"{path}: cannot be written: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):  # after the rename there is none
            temporary.unlink()
    # The file is complete by now; some file systems refuse to sync a directory, which costs durability only
    with contextlib.suppress(OSError):
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def one_at_a_time(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the context, at most one process at a time holds the folder; all others wait.

    No process waits if the file system cannot lock folders.
    """
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def compute_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, followed by the parts that an index names, in hexadecimal."""
    digest = hashlib.sha256()
    for part in (path, *list_parts(path)):
        try:
            with open_plain(part) as file:
                hashlib.file_digest(file, lambda: digest)
        except OSError as error:
            raise SwinQuantError(f"{part}: cannot be read: {reason(error)}") from error
    return digest.hexdigest()


def get_sha256(file: str | Path) -> str:
    """As `compute_sha256`; a file that every step of a run asks for is read once, and anew if it was written since."""
    path = Path(file)
    if not path.is_file() or list_parts(path):
        return compute_sha256(file)
    now = path.stat()
    return _hash_once(path.resolve(), now.st_mtime_ns, now.st_size)


@lru_cache(maxsize=16)
def _hash_once(path: Path, written: int, size: int) -> str:
    return compute_sha256(path)


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path, links followed; an index keeps its name and folder, where its parts are."""
    path = Path(path)
    return path.absolute() if path.name.endswith(INDEX) else path.resolve()


def list_parts(path: str | os.PathLike[str]) -> dict[Path, list[str]]:
    """The files beside an index, each with the tensors it holds; nothing for a file that is no index.

    SwinQuantError for names that lead elsewhere.
    """
    path = Path(path)
    if not path.name.endswith(INDEX):
        return {}
    index = read_json(path, "index of a checkpoint")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise SwinQuantError(f"{path}: is no index of a checkpoint: its weight_map must name a file for each tensor")
    names = sorted({*places.values()})
    if outside := [name for name in names if not re.fullmatch(r"\w[\w.-]*\.(safetensors|bin|pth?)", name)]:
        raise SwinQuantError(f"{path}: names {listed(map(repr, outside), 3):.200}, no weights in its own folder")
    if len(names) > _MOST_PARTS:
        raise SwinQuantError(f"{path}: names {len(names)} files, more than the {_MOST_PARTS} that it may")
    return {path.with_name(name): [key for key in places if places[key] == name] for name in names}


def compute_data_sha256(value: Any) -> str:
    """The SHA-256 of plain data as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """`value` (JSON's types, tuples) with every infinity and NaN replaced by None, which JSON can say."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    """`value` as indented JSON (RFC 8259), keys in their order. Infinity and NaN become null; ASCII, since a file's
    name may be no valid Unicode."""
    return json.dumps(finite(value), indent=2, allow_nan=False) + "\n"


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write the `json_text` of `value` atomically."""
    atomic_write_bytes(path, json_text(value).encode())


def read_bounded(path: str | os.PathLike[str], what: str, limit: int) -> bytes:
    """The content of a regular file that somebody else may have written, of at most `limit` bytes."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size + 1) if size <= limit else b""  # python reserves the requested bytes
            if len(data) > size:  # it has grown
                data += file.read(limit + 1 - len(data))
    except OSError as error:
        raise SwinQuantError(f"{path}: the {what} cannot be read: {reason(error)}") from error
    if max(size, len(data)) > limit:
        raise SwinQuantError(f"{path}: is larger than the {limit >> 20} MB a {what} may have")
    return data


def read_lines(path: str | os.PathLike[str], what: str) -> list[str]:
    """The lines of a UTF-8 text that are not blank, without the space around them; `what` names its kind in errors."""
    try:
        lines = read_bounded(path, what, _MAX_LINES_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise SwinQuantError(f"{path}: is no {what}: it is not UTF-8 text ({error.reason})") from error
    return [line.strip() for line in lines if line.strip()]


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Read JSON that somebody else may have written; `what` names its kind in errors, e.g. "run card"."""
    path = Path(path)
    if not path.is_file():
        raise SwinQuantError(f"{path}: no such {what}" + (": it is a directory" if path.is_dir() else near(path)))
    data = read_bounded(path, what, MAX_JSON_BYTES)
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_JSON_VALUES:
        raise SwinQuantError(f"{path}: holds more than the {_MAX_JSON_VALUES:,} values a {what} may have")
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SwinQuantError(f"{path}: is not a {what}: its JSON cannot be read ({error})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def configs_dir() -> Path:
    """The folder of the shipped configurations: inside an installed wheel, beside the package in a checkout."""
    return _shipped("configs")


def plugins_dir(library: str) -> Path:
    """The folder of the C++ sources of the operators for `library`."""
    return _shipped("plugins") / library


def _shipped(folder: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def shipped_files(kind: str) -> list[Path]:
    """The shipped files of a kind (`policies`, `recipes`), in the order of their names."""
    return sorted((configs_dir() / kind).glob("*.yaml"), key=lambda path: path.stem)
