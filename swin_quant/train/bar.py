"""The progress bar of a run: loss, learning rate, images a second, time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from swin_quant.base import progress as terminal
from swin_quant.train.state import Position

Show = Callable[[Position, float, float, float], None]


@contextmanager
def bar(total: int, done: int) -> Iterator[Show]:
    """A function to call after every step with position, loss, LR and images/s; plain lines where no terminal is."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.2e}  {task.fields[speed]:.0f} images/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal.console, disable=not terminal.shows_bars(), transient=True) as display:
        lines = terminal.Lines(total, done)
        task = display.add_task("", total=total, completed=done, epoch=1, loss=0.0, lr=0.0, speed=0.0)

        def show(position: Position, loss: float, lr: float, speed: float) -> None:
            display.update(task, completed=position.total, epoch=position.epoch + 1, loss=loss, lr=lr, speed=speed)
            note = f"loss {loss:.3f}, lr {lr:.2e}, {speed:.0f} images/s, "
            lines.show(f"epoch {position.epoch + 1}, steps", position.total, note)

        yield show
