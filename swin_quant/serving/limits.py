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
}


@dataclass(frozen=True)
class ServiceLimits:
    """`max_batch` pictures run at a time, for which a request waits `delay_us` microseconds at most; `max_queue`
    pictures may wait. A body has at most `max_megabytes`, and takes at most `timeout_s` seconds to come and as many
    again to be answered. UsageError for an impossible number.
    """

    max_batch: int = 8
    delay_us: int = 2000
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(f"‹{name}› {value}: must be from {least} to {most}")

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 2**20)


class Refused(Exception):
    """A request that cannot be answered: an HTTP status and one line for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.status = status

    def to_dict(self) -> dict[str, Any]:
        return {"error": str(self)}
