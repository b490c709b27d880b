"""Ctrl-C and SIGTERM become KeyboardInterrupt, though never in the middle of an import."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_SECONDS = 0.05


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside, both signals raise KeyboardInterrupt in the main thread; a signal that is ignored stays so.

    The importing machinery would turn an interrupt into another error, or print it and go on: there it is put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listened = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in (*listened, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None:  # which another library set, and python does not know
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # comes back as SIGALRM
            return
        frame = frame.f_back
    raise KeyboardInterrupt
