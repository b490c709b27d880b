"""The limits of a service: for its clients, for the bytes that requests hold, and the refusal beyond both."""

import asyncio
from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import check_limits

# The least and the most of each field of ServiceLimits.
_RANGES = {
    "max_batch": (1, 4096),
    "delay_us": (0, 10**7),
    "max_queue": (1, 10**6),
    "max_megabytes": (0.001, 4096),
    "timeout_s": (0.001, 3600),
    "max_megapixels": (0.001, 2048),
    "budget_megabytes": (64, 2**20),
}
_BODIES = 10  # largest bodies in the budget: a request may hold half of it, for its body and four times that in work
MOST_FRAMES = 2**14  # bytes around the chunks of a body, and as many as the body has
_HEADERS = {503: {"Retry-After": "1"}}


@dataclass(frozen=True)
class ServiceLimits:
    """`max_batch` pictures run at a time; a request waits at most `delay_us` microseconds for a fuller batch.

    `max_queue` requests may wait to be decoded, and as many pictures for the engine. A body has at most
    `max_megabytes`; a picture at most `max_megapixels`, summed over its scans. All requests together hold at most
    `budget_megabytes`. A request takes at most `timeout_s` seconds from its first byte to its answer.
    UsageError for an impossible number.
    """

    max_batch: int = 8
    delay_us: int = 2000
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30
    max_megapixels: float = 128
    budget_megabytes: float = 1024

    def __post_init__(self) -> None:
        check_limits(self, _RANGES)
        if self.budget_megabytes < _BODIES * self.max_megabytes:
            needed = f"{_BODIES} times ‹max_megabytes›, {_BODIES * self.max_megabytes:g}"
            raise UsageError(f"‹budget_megabytes› {self.budget_megabytes}: must be at least {needed}")

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 2**20)


class Refused(Exception):
    """A request that is not answered: an HTTP status, and one line for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.status = status
        self.headers = _HEADERS.get(status, {})

    def to_dict(self) -> dict[str, Any]:
        return {"error": str(self)}


class ByteBudget:
    """One budget for the bodies, decoded pictures, tensors and answers of all requests: `size` bytes, `held` taken."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0


class Hold:
    """The bytes that one request holds of a budget.

    A request has at most half of the bytes that the other requests leave: however many large ones come, small ones
    still find room.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.budget, self.held = budget, 0
        self.work: asyncio.Future[Any] | None = None  # runs on in its thread after the client has gone

    def check(self, size: int) -> None:
        """Refused if `size` more bytes are not to be had: 413 if they never are, 503 if they are not now."""
        free = self.budget.size - self.budget.held + self.held
        if 2 * (self.held + size) > self.budget.size:
            needed = f"{(self.held + size) / 2**20:,.0f} MB"
            raise Refused(413, f"the request needs {needed} of memory, more than a request may")
        if 2 * (self.held + size) > free:
            raise Refused(503, "too much is in work at the same time: try again later")

    def take(self, size: int) -> None:
        """Hold `size` more bytes. Refused as by `check`."""
        self.check(size)
        self._add(size)

    def give(self, size: int) -> None:
        self._add(-size)

    def end(self) -> None:
        """Give everything back, after the work that still runs."""
        if self.work and not self.work.done():
            self.work.add_done_callback(lambda _: self.end())
        else:
            self._add(-self.held)

    def _add(self, size: int) -> None:
        self.held += size
        self.budget.held += size
