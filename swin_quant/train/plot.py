"""The last picture of a run: loss, accuracy and how far ranges moved, drawn from the tables it wrote."""

import io
from pathlib import Path

from swin_quant.base.extras import library
from swin_quant.base.files import atomic_write_bytes
from swin_quant.train.record import EPOCHS, STEPS, read_table

FORMATS = ("png", "svg")


def draw(folder: Path, form: str = "png") -> Path:
    """Draw the tables of `folder` into `training.png` or `.svg` there. UsageError without matplotlib."""
    Figure = library("matplotlib.figure", "logs").Figure
    steps, epochs = read_table(folder / STEPS), read_table(folder / EPOCHS)
    panels = ["loss", *(name for name in ("acc1", "amax_drift", "clipped_share") if _column(epochs, name))]
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    axes = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True))

    axes["loss"].plot(_column(steps, "total"), _column(steps, "loss"), linewidth=0.5, alpha=0.6, label="training step")
    for name, label in (("train_loss", "training epoch"), ("val_loss", "validation")):
        if values := _column(epochs, name):
            axes["loss"].plot(_column(epochs, "total"), values, marker=".", label=label)
    axes["loss"].set(xlabel="step", ylabel="loss")
    axes["loss"].legend()
    labels = {
        "acc1": "validation top-1 (%)",
        "amax_drift": "mean |change| of amax",
        "clipped_share": "share of values clipped",
    }
    for name in panels[1:]:
        axes[name].plot(_column(epochs, "epoch"), _column(epochs, name), marker=".")
        axes[name].set(xlabel="epoch", ylabel=labels[name])
    path = folder / f"training.{form}"
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=120)
    atomic_write_bytes(path, picture.getbuffer())
    return path


def _column(rows: list[dict[str, str]], name: str) -> list[float]:
    """A column's numbers; empty unless every row has one."""
    values = [row[name] for row in rows if row.get(name)]
    return [float(value) for value in values] if len(values) == len(rows) else []
