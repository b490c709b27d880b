"""One budget of bytes for all that requests hold at a time: bodies, pictures being decoded, tensors, answers."""

import asyncio
from typing import Any

from swin_quant.serving.limits import Refused


class ByteBudget:
    """`size` bytes, of which `held` are taken."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0


class Hold:
    """What one request holds of a budget.

    A request has at most half of what the others leave: however many large ones come, small ones still find a place.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.budget, self.held = budget, 0
        self.work: asyncio.Future[Any] | None = None  # which runs on in its thread, whoever stops waiting for it

    def check(self, size: int) -> None:
        """Refused where `size` bytes more cannot be had: 413 if they never can, 503 if they cannot now."""
        free = self.budget.size - self.budget.held + self.held
        if 2 * (self.held + size) > self.budget.size:
            raise Refused(413, f"the request needs {_megabytes(self.held + size)} of memory, more than a request may")
        if 2 * (self.held + size) > free:
            raise Refused(503, "too much is in work at the same time: try again later")

    def take(self, size: int) -> None:
        """Hold `size` bytes more. Refused as by `check`."""
        self.check(size)
        self._add(size)

    def give(self, size: int) -> None:
        self._add(-size)

    def end(self) -> None:
        """Give everything back, once work that still runs has ended."""
        if self.work and not self.work.done():
            self.work.add_done_callback(lambda _: self.end())
        else:
            self._add(-self.held)

    def _add(self, size: int) -> None:
        self.held += size
        self.budget.held += size


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MB"
