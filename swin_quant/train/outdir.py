"""The output folder of a run: locked for one writer, refused if it holds another run, and opened again to go on.

Its tables have a row for every step and epoch.
"""

import csv
import errno
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, read_bounded, reason
from swin_quant.base.progress import log
from swin_quant.train.recipe import Recipe
from swin_quant.train.snapshot import Check, Snapshots

STEPS, EPOCHS = "steps.csv", "epochs.csv"
_MAX_BYTES = 1 << 28  # millions of steps
_LONGEST_ROW = 4096  # bytes


class Table:
    """A CSV file that grows by rows. A run that goes on at `until` drops the rows beyond, by the first column."""

    def __init__(self, path: Path, columns: tuple[str, ...], until: int) -> None:
        self.path, self.columns = path, columns
        kept: list[bytes] = []
        if until and path.exists():
            own = (row for row in read_table(path) if row.keys() == set(columns))
            kept = [_text([[row[name] for name in columns]]) for row in own if float(row[columns[0]] or "inf") <= until]
            if not kept:
                log.warning("%s is damaged: it is begun anew", path)
        atomic_write_bytes(path, b"".join([_text([columns]), *kept]))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; None is an empty cell."""
        values = [row.get(name) for name in self.columns]
        line = ["" if one is None else f"{one:.6g}" if isinstance(one, float) else str(one) for one in values]
        try:
            with open(self.path, "r+b") as file:
                file.seek(0, io.SEEK_END)
                file.write(_text([line]))
        except FileNotFoundError:  # the folder was moved away: keep the rows to come
            ensure_writable_dir(self.path.parent)
            atomic_write_bytes(self.path, _text([self.columns, line]))
        except OSError as error:
            raise SwinQuantError(f"{self.path}: cannot be written: {reason(error)}") from error


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a table one by one, except lines that are no row of numbers (cut short by a crash, foreign bytes)."""
    lines = io.BytesIO(read_bounded(path, "table", _MAX_BYTES))
    names: list[str] = []
    for line in iter(lambda: lines.readline(_LONGEST_ROW), b""):
        row = line.decode(errors="replace").rstrip("\r\n").split(",")
        if not names:
            names = row
        elif len(row) == len(names):
            try:
                [float(cell or 0) for cell in row]
            except ValueError:
                continue
            yield dict(zip(names, row, strict=True))


def _text(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


STEP_COLUMNS = ("total", "epoch", "step", "loss", "lr", "lr_amax", "grad_norm", "images_per_second")
EPOCH_COLUMNS = (
    *("epoch", "total", "train_loss", "val_loss", "acc1", "acc5"),
    *("amax_drift", "clipped_share", "seconds"),
)


class Record:
    """The tables of one run in `folder`; only rank 0 has them."""

    def __init__(self, folder: Path, total: int, epoch: int) -> None:
        """`total` steps and `epoch` epochs are done; later rows are dropped, since their part is trained again."""
        ensure_writable_dir(folder)
        self.steps = Table(folder / STEPS, STEP_COLUMNS, total)
        self.epochs = Table(folder / EPOCHS, EPOCH_COLUMNS, epoch)


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
    """UsageError if the folder holds a run and neither `resume` nor `overwrite` is set, or if both are."""
    if resume and overwrite:
        raise UsageError("‹continue› goes on with a run, ‹overwrite› replaces it: give one of them")
    snapshots = Snapshots(folder / "snapshots")
    files = *snapshots.newest_first(), snapshots.best_file, folder / STEPS, folder / EPOCHS
    if any(file.exists() for file in files) and not (resume or overwrite):
        remedy = "‹continue› goes on with it, ‹overwrite› replaces it, or another ‹output›"
        raise UsageError(f"{folder}: holds the files of a training: {remedy}")


def open_folder(
    folder: Path, settings: dict[str, Any], resume: bool, overwrite: bool, keep: int, check: Check
) -> dict[str, Any] | None:
    """The snapshot to go on from, or None for a fresh start in `folder`, which removes the former run.

    `check` raises for a snapshot of another model. UsageError as in `check_free`, for a run with other settings, and
    for a run with results but no snapshot. A run that ended before it had either starts again.
    """
    check_free(folder, resume, overwrite)
    snapshots = Snapshots(folder / "snapshots", keep)
    for file in snapshots.folder.glob(".*.tmp"):  # half-written by a killed run
        file.unlink(missing_ok=True)
    content = snapshots.newest(check) if resume else None
    if content is not None:
        before = content["settings"]
        if differing := [key for key in {**before, **settings} if before.get(key) != settings.get(key)]:
            changed = listed(f"{key} {before.get(key)!s:.80} -> {settings.get(key)!s:.80}" for key in differing)
            raise UsageError(f"{folder}: its run cannot go on with other settings: {changed}; ‹overwrite› starts anew")
        step, done = content["position"]["step"], content["position"]["epoch"]
        if step:
            log.info("going on after step %d of epoch %d", step, done + 1)
        else:
            log.info("going on after %d of %s epochs", done, settings.get("epochs"))
        return content
    epochs = folder / EPOCHS
    has_results = snapshots.best_file.exists() or (epochs.exists() and any(read_table(epochs)))
    if resume and has_results:
        raise UsageError(f"{folder}: has results of a run and no snapshot to go on from: ‹overwrite› starts anew")
    if resume:
        log.warning("%s: holds no run to go on with: a new one begins", folder)
    ensure_writable_dir(folder)
    snapshots.clear()
    for name in (STEPS, EPOCHS):
        (folder / name).unlink(missing_ok=True)
    return None


LOCK = ".lock"


@contextmanager
def only_writer(folder: Path, world: World) -> Iterator[None]:
    """Inside the context, `folder` is locked for this process; the kernel frees the lock of a process that ends.

    SwinQuantError if another process has the lock. Only the main rank writes and locks. A file system without locks
    refuses nobody.
    """
    if not world.is_main:
        yield
        return
    is_new = not folder.exists()
    path = ensure_writable_dir(folder) / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise SwinQuantError(f"{path}: cannot be written: {reason(error)}") from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked loaders do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            raise SwinQuantError(
                f"{folder}: another training is writing there: wait for its end, or give another ‹output›"
            ) from error
    try:
        yield
    finally:
        os.close(handle)
        with suppress(OSError):  # the folder may have been moved away
            if is_new and os.listdir(folder) == [LOCK]:  # what was refused leaves nothing
                path.unlink()
                folder.rmdir()
