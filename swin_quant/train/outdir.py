"""The output folder of a run: locked for one writer, refused if it holds another run, and opened again to go on.

Its tables have a row for every step and epoch, in TensorBoard too if wanted, and become a plot. The kernel frees the
lock of a dead owner; the locked file names the owner.
"""

import csv
import errno
import fcntl
import io
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.extras import library
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
            own = (row for row in _rows(path) if row.keys() == set(columns))
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


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table, except lines that are no row of numbers (cut short by a crash, foreign bytes)."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows one by one: a row takes ten times the memory of its line."""
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
    """The logs of one run in `folder`; only rank 0 has one."""

    def __init__(self, folder: Path, total: int, epoch: int, tensorboard: bool = False) -> None:
        """`total` steps and `epoch` epochs are done; later rows are dropped, since their part is trained again."""
        ensure_writable_dir(folder)
        self.steps = Table(folder / STEPS, STEP_COLUMNS, total)
        self.epochs = Table(folder / EPOCHS, EPOCH_COLUMNS, epoch)
        self.board: Any = None
        if tensorboard:
            make = library("torch.utils.tensorboard", "logs").SummaryWriter
            self.board = make(folder / "tensorboard", purge_step=total + 1)

    def step(self, row: Mapping[str, Any]) -> None:
        self.steps.add(row)
        self._show("step", row)

    def epoch(self, row: Mapping[str, Any], histograms: Mapping[str, list[float]]) -> None:
        """`histograms`: values by name, for TensorBoard alone."""
        self.epochs.add(row)
        self._show("epoch", row)
        if self.board:
            import numpy as np

            for name, values in histograms.items():
                self.board.add_histogram(name, np.array(values), row["total"])
            self.board.flush()

    def _show(self, prefix: str, row: Mapping[str, Any]) -> None:
        for name, value in row.items() if self.board else ():
            if isinstance(value, float):
                self.board.add_scalar(f"{prefix}/{name}", value, row["total"])

    def close(self) -> None:
        if self.board:
            self.board.close()


_POINTS = 2.0  # the least span of the top-1 axis, in points: less is mostly chance
_PANELS = {
    "acc1": "validation top-1 (%)",
    "amax_drift": "mean |change| of amax",
    "clipped_share": "share of values clipped",
}
_STYLES = (":", "--", "-.")


def draw(folder: Path, form: str = "png", title: str = "", levels: Mapping[str, float] | None = None) -> Path:
    """Draw the tables of `folder` into `training.png` or `.svg` there. UsageError without matplotlib.

    `levels`: top-1, in percent, of models to compare with, drawn as lines. Losses, drifts and shares start at zero, and
    top-1 spans at least two points: chance must not look like a trend.
    """
    Figure = library("matplotlib.figure", "logs").Figure
    steps, epochs = read_table(folder / STEPS), read_table(folder / EPOCHS)
    panels = ["loss", *(name for name in _PANELS if _column(epochs, name))]
    figure = Figure(figsize=(4.5 * len(panels), 3.7), layout="constrained")
    figure.suptitle(title)
    axes = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True))

    axes["loss"].plot(_column(steps, "total"), _column(steps, "loss"), linewidth=0.5, alpha=0.6, label="training step")
    for name, label in (("train_loss", "training epoch"), ("val_loss", "validation")):
        if values := _column(epochs, name):
            axes["loss"].plot(_column(epochs, "total"), values, marker=".", label=label)
    axes["loss"].set(xlabel="step", ylabel="loss")
    axes["loss"].set_ylim(bottom=0)
    axes["loss"].legend()
    for name in panels[1:]:
        axes[name].plot(_column(epochs, "epoch"), _column(epochs, name), marker=".")
        axes[name].set(xlabel="epoch", ylabel=_PANELS[name])
        if name == "acc1":
            values, styles = _column(epochs, name), zip((levels or {}).items(), _STYLES, strict=False)
            for (model, level), style in styles:
                axes[name].axhline(level, color="black", linestyle=style, linewidth=1, label=f"{model} {level:.2f}")
            values += (levels or {}).values()
            low, high = min(values), max(values)
            room = max(0.05 * (high - low), (_POINTS - (high - low)) / 2)
            axes[name].set_ylim(low - room, high + room)
            if levels:
                axes[name].legend()
        else:
            axes[name].set_ylim(bottom=0)
    for axis in axes.values():
        axis.xaxis.get_major_locator().set_params(integer=True)
    path = folder / f"training.{form}"
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=120)
    atomic_write_bytes(path, picture.getbuffer())
    return path


def _column(rows: list[dict[str, str]], name: str) -> list[float]:
    """A column's numbers; empty unless every row has one."""
    values = [row[name] for row in rows if row.get(name)]
    return [float(value) for value in values] if len(values) == len(rows) else []


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
    for file in snapshots.folder.glob(".*.tmp"):  # half-written by a killed run
        file.unlink(missing_ok=True)
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
