"""SIGTERM and SIGINT as a request: the step in hand is finished and saved, then the run ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Asked(KeyboardInterrupt):
    """All ranks know that the run is to end, and are at the same place of it."""


class Interruption:
    """Whether somebody asked the run to end."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: object) -> None:
        if self.asked:  # twice means now
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Listen to both signals inside; in another thread than the main one, where python cannot, never be asked.

    KeyboardInterrupt at the end for a request that nobody has seen.
    """
    request = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.asked:
        raise KeyboardInterrupt
