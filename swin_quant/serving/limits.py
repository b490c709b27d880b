"""What a service lets its clients do, and how long it waits."""

from dataclasses import dataclass
from typing import Any

from swin_quant.base.errors import UsageError

_RANGES = {
    "max_batch": (1, 4096),
    "delay_us": (0, 10**7),
    "max_queue": (1, 10**6),
    "max_megabytes": (0.001, 4096),
    "timeout_s": (0.001, 3600),
    "max_megapixels": (0.001, 2048),
    "budget_megabytes": (64, 2**20),
}
_BODIES = 10  # of the largest in the budget: a request has half of it at most, for its body and four times that


@dataclass(frozen=True)
class ServiceLimits:
    """`max_batch` pictures run at a time, for which a request waits `delay_us` microseconds at most. `max_queue`
    requests may wait to be decoded, and as many pictures for the engine. A body has at most `max_megabytes`, a picture
    `max_megapixels`, those of every scan. All that requests hold at a time has `budget_megabytes`. From its first byte
    to its answer a request takes at most `timeout_s` seconds. UsageError for an impossible number.
    """

    max_batch: int = 8
    delay_us: int = 2000
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30
    max_megapixels: float = 128
    budget_megabytes: float = 1024

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(f"‹{name}› {value}: must be from {least} to {most}")
        if self.budget_megabytes < _BODIES * self.max_megabytes:
            raise UsageError(f"‹budget_megabytes› {self.budget_megabytes}: must be at least {_BODIES} times "
                             f"‹max_megabytes›, {_BODIES * self.max_megabytes:g}")  # fmt: skip

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 2**20)


_HEADERS = {503: {"Retry-After": "1"}}


class Refused(Exception):
    """A request that cannot be answered: an HTTP status and one line for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.status = status
        self.headers = _HEADERS.get(status, {})

    def to_dict(self) -> dict[str, Any]:
        return {"error": str(self)}
