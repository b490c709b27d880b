"""What a pass is, and what it works on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.places import Exchange, Part


@dataclass(frozen=True)
class Workpiece:
    """A calibrated network under its policy, nodes off, and the pictures of all ranks in batches [<= 8, 3, H, W].

    `units`: what the forward pass runs one after the other, each on what the one before gave; `outputs`: parameters
    that are added to what a unit gives; `exchanges`: where factors and offsets are free. A pass changes the network.
    """

    model: nn.Module
    images: Sequence[Tensor]
    method: Method = Method()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    exchanges: Sequence[Exchange] = ()
    outputs: Sequence[Part] = ()

    def first(self, pictures: int) -> list[Tensor]:
        """Batches of the first pictures."""
        found: list[Tensor] = []
        for batch in self.images:
            if pictures > 0:
                found.append(batch[:pictures])
            pictures -= len(batch)
        return found


@dataclass(frozen=True)
class Pass:
    """A way to make a calibrated network better.

    `run(piece, options)` changes its network and says in half a line what it did; `options` are a frozen dataclass
    with defaults, which checks itself (UsageError). `keeps_function`: in float, the network computes what it did, and
    its ranges are observed again. `of_ranges`: it chooses ranges, which must not be observed again behind it.
    """

    run: Callable[[Workpiece, Any], str]
    options: type[Any]
    keeps_function: bool = False
    of_ranges: bool = False
