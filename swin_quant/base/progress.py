"""Progress bars and messages, on one console on standard error.

Bars appear only on a terminal, on rank 0 and unless quiet; elsewhere occasional lines report progress. Messages go
through `logging`, so that a library user can redirect or silence them; `set_up` is for the command line.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from swin_quant.base.errors import in_words

T = TypeVar("T")
console = Console(stderr=True)
bars = True
log = logging.getLogger("swin_quant")
clock: Callable[[], float] = time.monotonic  # seconds
LINE_SECONDS = 5.0  # between plain lines, or a tenth of the time that has passed: a long log stays readable


def _in_words(record: logging.LogRecord) -> bool:
    """Gives the fields in messages their names in this context, as in errors."""
    record.msg, record.args = in_words(record.getMessage()), ()
    return True


log.addFilter(_in_words)


class _ConsoleHandler(logging.Handler):
    """Prints above a live progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else ""
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        with contextlib.suppress(OSError):  # a message that cannot be written is no reason to end the work
            console.print(Text(prefix + self.format(record), style=style), soft_wrap=True)


def set_up(verbose: bool = False, quiet: bool = False, rank: int = 0) -> None:
    """Choose the shown messages: everything (`verbose`), warnings (`quiet`); ranks other than 0 show warnings, no
    bars."""
    global bars
    bars = not quiet and rank == 0
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    log.setLevel(level if rank == 0 else max(level, logging.WARNING))
    log.handlers = [_ConsoleHandler()]
    log.propagate = False
    logging.raiseExceptions = False  # a log file on a full disk must not fill the screen with tracebacks


def shows_bars() -> bool:
    """Whether standard error is a terminal."""
    return bars and console.is_terminal


class Lines:
    """Lines instead of a bar, without a terminal: the share of `total` that is done, and the time so far and left."""

    def __init__(self, total: int | None, done: int = 0) -> None:
        self.total, self.before, self.start = total, done, clock()
        self.due = self.start + LINE_SECONDS

    def show(self, description: str, done: int, note: str = "") -> None:
        """Log a line, if enough time has passed."""
        now = clock()
        if not bars or console.is_terminal or now < self.due:
            return
        took = now - self.start
        self.due = now + max(LINE_SECONDS, took / 10)
        left = ""
        if self.total and self.before < done < self.total:
            left = f", about {_span(took * (self.total - done) / (done - self.before))} left"
        log.info("%s: %d%s, %s%s%s", description, done, f" of {self.total}" * bool(self.total), note, _span(took), left)


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def track(items: Iterable[T], description: str, total: int | None = None, unit: int = 1) -> Iterator[T]:
    """Yield `items` under a bar of `total` units, one `unit` a step, or with plain lines without a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not shows_bars(), transient=True) as progress:
        task = progress.add_task(description, total=total)
        lines = Lines(total)
        for number, item in enumerate(items, 1):
            yield item
            progress.advance(task, unit)
            lines.show(description, number * unit)
