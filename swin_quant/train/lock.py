"""One writer a folder: a lock that the kernel takes from a dead owner, in a file that says who the owner is."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import ensure_writable_dir, reason

NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: set[tuple[int, Path]] = set()  # with the pid: a fork owns nothing of its parent's


@contextmanager
def only_writer(folder: Path, world: World) -> Iterator[None]:
    """Make `folder` this process's own inside; what it owns already it may own again.

    SwinQuantError if another process has it. Ranks other than the main one write nothing and own nothing.
    """
    path = ensure_writable_dir(folder).resolve() / NAME if world.is_main else None
    if path is None or (os.getpid(), path) in _held:
        yield
        return
    try:
        handle = _lock(path)
    except OSError as error:
        raise SwinQuantError(f"{path}: cannot be written: {reason(error)}") from error
    _held.add((os.getpid(), path))
    try:
        yield
    finally:
        _held.discard((os.getpid(), path))
        with suppress(OSError):  # the folder may be gone, or another one be in its place
            if _is_still(handle, path):
                path.unlink()
        os.close(handle)


def _lock(path: Path) -> int:
    """The handle of the locked file: while it is open, nobody else gets it. Loaders that this process forks do not
    inherit the lock, so that it ends with its owner."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _take(handle, path.parent)
            if _is_still(handle, path):  # and not the file of an owner who has just removed it
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    try:
        owner = json.loads(os.pread(handle, 1000, 0))
        pid, host = int(owner["pid"]), str(owner["host"])
    except (ValueError, TypeError, KeyError):  # no owner yet, or none that we can read
        pid, host = 0, ""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        taken = error.errno in _TAKEN
        if taken or _lives(pid, host):  # where there are no locks, the pid has to do
            advice = "" if taken else f"; if it is no more, remove {folder / NAME}"
            raise SwinQuantError(
                f"{folder}: another training (process {pid} on {host:.60}) is writing there: wait for its end, or give "
                f"another ‹output›{advice}"
            ) from error


def _lives(pid: int, host: str) -> bool:
    """Whether the owner may be alive: of another machine nobody here knows."""
    if host != socket.gethostname():
        return bool(host)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no pid at all
        pass
    return True


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
