"""The limits on a policy's loss and latency that a search keeps."""

import math
from dataclasses import asdict, dataclass, replace

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.quant.distance import Loss

_FEW = 100  # pictures times points: a sample of fewer may show no difference and still hide the drop
_LIMITS = {  # the words for each, and the largest number that says something
    "max_drop": ("expected drop of top-1 at most {:g} points", 100.0),
    "min_agreement": ("agreement at least {:g} %", 100.0),
    "min_sqnr": ("SQNR at least {:g} dB", math.inf),
    "max_ms": ("at most {:g} ms", math.inf),
}


@dataclass(frozen=True)
class Budget:
    """Limits of a policy's loss and latency; None: no limit. The drop counts with two standard errors.

    Args:
        max_drop: expected drop of top-1 accuracy, in points (default 0.1)
        min_agreement: top-1 agreement with float, in percent
        min_sqnr: SQNR of the logits, in dB
        max_ms: latency of a batch on the engine, in milliseconds

    Raises:
        UsageError: A limit that no policy keeps, or that every policy keeps.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    min_sqnr: float | None = None
    max_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _LIMITS[name][1]
            if value is not None and not (0 <= value <= most and value < math.inf):
                raise UsageError(f"‹{name}› {value:g}: must be a number from 0 " + ("up", "to 100")[most < math.inf])

    @property
    def or_default(self) -> "Budget":
        """These limits; a drop of 0.1 points where none of the loss is given."""
        return self if replace(self, max_ms=None) != Budget() else replace(self, max_drop=0.1)

    def allows(self, loss: Loss) -> bool:
        return (
            (self.max_drop is None or loss.most_drop <= self.max_drop)
            and (self.min_agreement is None or loss.agreement >= self.min_agreement)
            and (self.min_sqnr is None or loss.sqnr_db >= self.min_sqnr)
        )

    def tell_if_few(self, pictures: int) -> None:
        """Warn where so many pictures may show no difference and still hide the drop."""
        if (drop := self.max_drop) and pictures * drop < _FEW:
            told = "%d pictures hardly tell a drop of %g points: give %d or more (‹pictures›)"
            log.warning(told, pictures, drop, math.ceil(_FEW / max(drop, 1e-6)))

    def __str__(self) -> str:
        return ", ".join(_LIMITS[name][0].format(value) for name, value in asdict(self).items() if value is not None)
