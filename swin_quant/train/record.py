"""The records of a run: a row for every step and epoch, as CSV, in TensorBoard if wanted, and as a plot."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir, read_bounded, reason
from swin_quant.base.progress import log

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
        if self.board:
            _scalars(self.board, "step", row, row["total"])

    def epoch(self, row: Mapping[str, Any], histograms: Mapping[str, list[float]]) -> None:
        """`histograms`: values by name, for TensorBoard alone."""
        self.epochs.add(row)
        if self.board:
            _scalars(self.board, "epoch", row, row["total"])
            import numpy as np

            for name, values in histograms.items():
                self.board.add_histogram(name, np.array(values), row["total"])
            self.board.flush()

    def close(self) -> None:
        if self.board:
            self.board.close()


def _scalars(board: Any, prefix: str, row: Mapping[str, Any], step: int) -> None:
    for name, value in row.items():
        if isinstance(value, float):
            board.add_scalar(f"{prefix}/{name}", value, step)


FORMATS = ("png", "svg")
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
