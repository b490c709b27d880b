"""The limits of a service, and the refusal of a request that exceeds them."""

from dataclasses import dataclass

from swin_quant.base.schema import check_limits

# The least and the most of each field of ServiceLimits.
_RANGES = {
    "max_batch": (1, 4096),
    "delay_us": (0, 10**7),
    "max_queue": (1, 10**6),
    "max_megabytes": (0.001, 4096),
    "timeout_s": (0.001, 3600),
    "max_megapixels": (0.001, 2048),
}


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of batches and requests. UsageError for an impossible number.

    Args:
        max_batch: pictures that run at a time
        delay_us: microseconds that a picture waits for a fuller batch
        max_queue: requests in work at a time, and pictures that wait for the engine
        max_megabytes: megabytes of a body
        timeout_s: seconds for the body of a request to arrive, and again for its answer
        max_megapixels: megapixels of a picture, multiplied by the scans of a progressive JPEG
    """

    max_batch: int = 8
    delay_us: int = 2000
    max_queue: int = 256
    max_megabytes: float = 32
    timeout_s: float = 30
    max_megapixels: float = 128

    def __post_init__(self) -> None:
        check_limits(self, _RANGES)

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 2**20)


class Refused(Exception):
    """A request that is not answered: an HTTP status, and one line for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.status = status
