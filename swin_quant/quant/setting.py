"""A policy's decision for a node: whether it quantizes, and on which grid."""

from dataclasses import dataclass

from swin_quant.quant.fake_quant import FORMATS, FP8, grid


@dataclass(frozen=True)
class Setting:
    """A policy's decision for one node.

    `block`: the number of values in a row of a weight [out, in] that share a range; None: the whole row. `amax`: a
    fixed range instead of the calibrated one.
    """

    enabled: bool = False
    bits: int = 8
    granularity: str = "per-tensor"
    block: int | None = None
    narrow_range: bool = False
    symmetric: bool = True
    format: str = FORMATS[0]
    amax: float | None = None

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a weight has a range."""
        return self.granularity == "per-channel"

    @property
    def levels(self) -> tuple[int, int]:
        """Smallest and largest level of the format and bits, without a zero point."""
        return grid(self.bits, self.narrow_range, self.format)

    @property
    def kind(self) -> str:
        """The type of the levels: `int8`, `int4`, `fp8`."""
        return FP8 if self.format == FP8 else f"int{self.bits}"
