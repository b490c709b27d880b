"""What a person sees while work goes on: one console on standard error for bars and messages.

Bars appear only on a terminal, on rank 0 and unless quiet. Messages go through `logging`, so that a library user can
redirect or silence them; `set_up` is for the command line.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

T = TypeVar("T")
console = Console(stderr=True)
bars = True
log = logging.getLogger("swin_quant")


class _ConsoleHandler(logging.Handler):
    """Prints above a live progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else ""
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        console.print(Text(prefix + self.format(record), style=style), soft_wrap=True)


def set_up(verbose: bool = False, quiet: bool = False, rank: int = 0) -> None:
    """Choose what is shown: everything (`verbose`), warnings (`quiet`); other ranks than 0 show warnings, no bars."""
    global bars
    bars = not quiet and rank == 0
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    log.setLevel(level if rank == 0 else max(level, logging.WARNING))
    log.handlers = [_ConsoleHandler()]
    log.propagate = False
    logging.raiseExceptions = False  # a log file on a full disk must not fill the screen with tracebacks


def track(items: Iterable[T], description: str, total: int | None = None, unit: int = 1) -> Iterator[T]:
    """Yield `items` under a progress bar of `total` units, `unit` a step; silent where nobody looks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (bars and console.is_terminal), transient=True) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task, unit)
