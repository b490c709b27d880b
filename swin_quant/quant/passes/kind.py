"""What a pass is, and what it works on."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.places import Exchange
from swin_quant.quant.passes.scratch import Scratch
from swin_quant.quant.passes.units import UnitRun, walk


@dataclass(frozen=True)
class PassContext:
    """A calibrated network under its policy, nodes off, and the pictures of all ranks in batches [<= 8, 3, H, W].

    `units`: what the forward pass runs one after the other, each on what the one before gave; `exchanges`: where
    factors and offsets are free; `padded`: the names of modules that are given zeros beside tokens [windows, tokens,
    channels] where these weights serve maps of other sizes; `fixed`: those of norms that would be such a place if they
    had weights. A pass changes the network; `original` is a copy of what it was, by which every pass measures.
    `scratch`: where a long one keeps what is done.
    """

    model: nn.Module
    images: Sequence[Tensor]
    method: Method = Method()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    exchanges: Sequence[Exchange] = ()
    scratch: Scratch = Scratch()
    padded: Sequence[str] = ()
    fixed: Sequence[str] = ()
    original: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "original", copy.deepcopy(self.model))

    def first(self, pictures: int) -> list[Tensor]:
        """Batches of the first pictures."""
        found: list[Tensor] = []
        for batch in self.images:
            if pictures > 0:
                found.append(batch[:pictures])
            pictures -= len(batch)
        return found

    def walk(self, pictures: int) -> Iterator[UnitRun]:
        """Each unit in order with what the original gives on the first pictures; it may be changed on the way."""
        return walk(self.model, self.units, self.first(pictures), self.original)


@dataclass(frozen=True)
class Pass:
    """A way to make a calibrated network better.

    `run(context, options)` changes its network and says in half a line what it did; `options` are a frozen dataclass
    with defaults, which checks itself (UsageError). `keeps_function`: in float, the network computes what it did.
    `of_ranges`: it chooses ranges, which must not be observed again behind it; behind one that keeps the function and
    chooses none, they are. `judges_itself`: what it leaves was better in the logits or classes, on pictures held out.
    """

    run: Callable[[PassContext, Any], str]
    options: type[Any]
    keeps_function: bool = False
    of_ranges: bool = False
    judges_itself: bool = False

    @property
    def observes_again(self) -> bool:
        return self.keeps_function and not self.of_ranges
