"""The plot of a run: loss, accuracy and the drift of ranges, from the tables that the run wrote."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes
from swin_quant.train.record import EPOCHS, STEPS, read_table

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

    `levels`: top-1 in percent of models to compare with, as lines. Losses, drifts and shares start at zero, and top-1
    spans two points or more: chance must not look like a trend.
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
            _beside(axes[name], _column(epochs, name), levels or {})
        else:
            axes[name].set_ylim(bottom=0)
    for axis in axes.values():
        axis.xaxis.get_major_locator().set_params(integer=True)
    path = folder / f"training.{form}"
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=120)
    atomic_write_bytes(path, picture.getbuffer())
    return path


def _beside(axis: Any, values: list[float], levels: Mapping[str, float]) -> None:
    for (name, level), style in zip(levels.items(), _STYLES, strict=False):
        axis.axhline(level, color="black", linestyle=style, linewidth=1, label=f"{name} {level:.2f}")
    low, high = min((*values, *levels.values())), max((*values, *levels.values()))
    room = max(0.05 * (high - low), (_POINTS - (high - low)) / 2)
    axis.set_ylim(low - room, high + room)
    if levels:
        axis.legend()


def _column(rows: list[dict[str, str]], name: str) -> list[float]:
    """A column's numbers; empty unless every row has one."""
    values = [row[name] for row in rows if row.get(name)]
    return [float(value) for value in values] if len(values) == len(rows) else []
