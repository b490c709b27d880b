"""The output folder of a run: locked for one writer, refused if it holds another run, and opened again to go on.

The kernel frees the lock of a dead owner; the locked file names the owner.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir, reason
from swin_quant.base.progress import log
from swin_quant.train.recipe import Recipe
from swin_quant.train.record import EPOCHS, STEPS, read_table
from swin_quant.train.snapshot import Check, Snapshots

# Keys of a recipe that may change when a run goes on. They do not change the computation, except `compile`, which
# changes the last bits and the draws of drop path, as another machine may.
_FREE = (
    *("name", "description", "patience", "save_minutes", "keep"),
    *("batch_size", "accumulation_steps", "memory", "compile"),
)


def list_settings(recipe: Recipe, world_size: int, seed: int, **more: Any) -> dict[str, Any]:
    """The settings, by dotted key, that a run must share with its snapshot to go on from it.

    Ranks and accumulation steps may replace each other: only their product matters.
    """
    settings: dict[str, Any] = {}
    for key, value in recipe.to_dict().items():
        if key not in _FREE:
            parts = value.items() if isinstance(value, dict) else [("", value)]
            settings |= {f"{key}.{name}".rstrip("."): item for name, item in parts}
    batch = {"batch_size": recipe.batch_size, "accumulation_steps x ranks": recipe.accumulation_steps * world_size}
    return settings | batch | {"seed": seed} | more


def check_free(folder: Path, resume: bool, overwrite: bool) -> None:
    """UsageError if the folder holds a run and neither `resume` nor `overwrite` is set."""
    snapshots = Snapshots(folder / "snapshots")
    files = *snapshots.newest_first(), snapshots.best_file, folder / STEPS, folder / EPOCHS
    if any(file.exists() for file in files) and not (resume or overwrite):
        raise UsageError(
            f"{folder}: holds another run: ‹continue› goes on with it, ‹overwrite› replaces it, or another ‹output›"
        )


def open_folder(
    folder: Path, settings: dict[str, Any], resume: bool, overwrite: bool, keep: int, check: Check
) -> dict[str, Any] | None:
    """The snapshot to go on from, or None for a fresh start in `folder`, which removes the former run.

    `check` raises for a snapshot of another model. UsageError as in `check_free`, for a run with other settings, and
    for a run with results but no snapshot. A run that ended before it had either starts again.
    """
    check_free(folder, resume, overwrite)
    snapshots = Snapshots(folder / "snapshots", keep)
    snapshots.sweep()
    content = snapshots.newest(check) if resume and not overwrite else None
    if content is not None:
        before = content["settings"]
        if differing := [key for key in {**before, **settings} if before.get(key) != settings.get(key)]:
            changed = listed(f"{key} {before.get(key)!s:.80} -> {settings.get(key)!s:.80}" for key in differing)
            raise UsageError(f"{folder}: its run cannot go on with other settings: {changed}; ‹overwrite› starts anew")
        log.info("going on after step %d of epoch %d", content["position"]["step"], content["position"]["epoch"] + 1)
        return content
    epochs = folder / EPOCHS
    has_results = snapshots.best_file.exists() or (epochs.exists() and bool(read_table(epochs)))
    if resume and not overwrite and has_results:
        raise UsageError(f"{folder}: has results of a run and no snapshot to go on from: ‹overwrite› starts anew")
    ensure_writable_dir(folder)
    snapshots.clear()
    for name in (STEPS, EPOCHS):
        (folder / name).unlink(missing_ok=True)
    return None


NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: set[tuple[int, Path]] = set()  # with the process id: a fork does not own its parent's lock


@contextmanager
def only_writer(folder: Path, world: World) -> Iterator[None]:
    """Inside the context, `folder` is locked for this process, which may lock it again.

    SwinQuantError if another process has the lock. Only the main rank writes and locks.
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
        with suppress(OSError):  # the folder may be gone or replaced
            if _is_still(handle, path):
                path.unlink()
        os.close(handle)


def _lock(path: Path) -> int:
    """The handle of the locked file; the lock lasts while it is open. Forked loaders do not inherit the lock, so it
    ends with its owner."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            try:
                owner = json.loads(os.pread(handle, 1000, 0))
                pid, host = int(owner["pid"]), str(owner["host"])
            except (ValueError, TypeError, KeyError):  # no owner, or an unreadable one
                pid, host = 0, ""
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                taken = error.errno in _TAKEN
                if taken or _lives(pid, host):  # on a file system without locks, the process id decides
                    advice = "" if taken else f"; if it is no more, remove {path}"
                    raise SwinQuantError(
                        f"{path.parent}: another training (process {pid} on {host:.60}) is writing there: wait for its "
                        f"end, or give another ‹output›{advice}"
                    ) from error
            if _is_still(handle, path):  # otherwise a former owner has just removed it
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lives(pid: int, host: str) -> bool:
    """Whether the owner may be alive; on another machine it always may."""
    if host != socket.gethostname():
        return bool(host)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or an invalid id
        pass
    return True


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
