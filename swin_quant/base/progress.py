"""Progress bars and messages, on one console on standard error.

Bars appear only on a terminal, on rank 0 and unless quiet; elsewhere occasional lines report how far it is. Messages go
through `logging`, so that a library user can redirect or silence them; `set_up` is for the command line.
"""

import contextlib
import functools
import io
import logging
import time
import warnings
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


@functools.cache
def tell_once(message: str, level: int = logging.INFO, waits: bool = False) -> None:
    """Log a message that several steps of one process would repeat. A command prints one that `waits` when its work
    begins: before an error alone nobody needs it."""
    log.log(level, "%s", message, extra={"waits": waits})


class _ConsoleHandler(logging.Handler):
    """Prints above a live progress bar instead of through it; a warning that was printed before is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[str] = set()
        self.waiting: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "waits", False):
            self.waiting.append(record)
        else:
            self.print_waiting()
            self._print(record)

    def print_waiting(self) -> None:
        """Print what waits."""
        while self.waiting:
            self._print(self.waiting.pop(0))

    def _print(self, record: logging.LogRecord) -> None:
        style, prefix = ("yellow", "warning: ") if record.levelno >= logging.WARNING else ("", "")
        if prefix:
            if record.getMessage() in self.warned:
                return
            self.warned.add(record.getMessage())
        with contextlib.suppress(OSError):  # a message that cannot be written is no reason to end the work
            console.print(Text(prefix + self.format(record), style=style), soft_wrap=True)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Inside the context, libraries print and log nothing: a failure is reported in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


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


def print_waiting() -> None:
    """Print the messages that wait for the work to begin."""
    for handler in log.handlers:
        if isinstance(handler, _ConsoleHandler):
            handler.print_waiting()


works: list[str] = []  # in progress, the outermost first


class Lines:
    """Lines instead of a bar, without a terminal: the share of `total` that is done, and the time so far and left."""

    def __init__(self, total: int | None, done: int = 0, noun: str = "") -> None:
        self.total, self.before, self.start = total, done, clock()
        self.due = self.start + LINE_SECONDS
        self.noun = f" {noun}" if noun else ""

    def show(self, description: str, done: int, note: str = "") -> None:
        """Write a line, if enough time has passed."""
        now = clock()
        if not bars or console.is_terminal or now < self.due:
            return
        took = now - self.start
        self.due = now + max(LINE_SECONDS, took / 10)
        left = ""
        if self.total and self.before < done < self.total:
            left = f", about {span(took * (self.total - done) / (done - self.before))} left"
        total = f" of {self.total}" if self.total else ""
        log.info("%s: %d%s%s, %s%s%s", description, done, total, self.noun, note, span(took), left)


def span(seconds: float) -> str:
    """A time in words."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def make_bar(before: str, after: str) -> Progress:
    """A bar on the console between two texts, with the time so far and left; not shown without a terminal."""
    print_waiting()
    share = (TextColumn(before), BarColumn(), MofNCompleteColumn(), TextColumn(after))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*share, *times, console=console, disable=not (bars and console.is_terminal), transient=True)


def track(items: Iterable[T], description: str, total: int | None = None, noun: str = "") -> Iterator[T]:
    """Yield `items` under a bar of `total` items, or with plain lines without a terminal. `noun`: their plural."""
    works.append(description)
    try:
        lines = Lines(total, noun=noun)
        with make_bar("{task.description}", noun) as progress:
            task = progress.add_task(description, total=total)
            for number, item in enumerate(items, 1):
                yield item
                progress.advance(task)
                lines.show(description, number)
    finally:
        works.remove(description)
