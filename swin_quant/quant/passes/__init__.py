"""Passes improve a calibrated network without labels: each a file with its PASS; `quant` lists them."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.progress import track
from swin_quant.quant import PASSES
from swin_quant.quant.calibration import Method
from swin_quant.quant.passes.places import Exchange
from swin_quant.quant.passes.units import UnitRun, entering, through


@dataclass(frozen=True)
class PassContext:
    """A calibrated network under its policy, nodes off, and the pictures of all ranks in batches [<= 8, 3, H, W].

    `units`: the modules that a forward pass runs one after another, each on the previous one's output. `exchanges`:
    places where factors and offsets are free. `padded`: modules that get zeros beside their tokens [windows, tokens,
    channels] for maps of other sizes. A pass changes the network and measures against `original`, a copy from before;
    without `changes` the network is only measured, and no copy is made. `measured`: what a pass keeps for a next one.
    """

    model: nn.Module
    images: Sequence[Tensor]
    method: Method = Method()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    exchanges: Sequence[Exchange] = ()
    padded: Sequence[str] = ()
    changes: bool = True
    original: nn.Module = field(init=False)
    measured: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "original", copy.deepcopy(self.model) if self.changes else self.model)

    def first(self, pictures: int) -> list[Tensor]:
        """Batches of the first pictures: two at least, if there are two pictures."""
        found: list[Tensor] = []
        for batch in self.images:
            if pictures > 0:
                found.append(batch[:pictures])
            pictures -= len(batch)
        return list(found[0].tensor_split(2)) if len(found) == 1 and len(found[0]) > 1 else found

    def walk(self, images: Sequence[Tensor], work: str = "units") -> Iterator[UnitRun]:
        """Each unit in order, with the original's inputs and outputs for the images; it may be changed."""
        inputs: list[Tensor] = []
        for name, unit in track(list(self.units.items()), work, len(self.units), "units"):
            source = self.original.get_submodule(name)
            if not inputs:
                with torch.inference_mode():
                    inputs = entering(self.original, source, images)
            outputs = through(source, inputs)
            yield UnitRun(name, unit, inputs, outputs, source)
            inputs = outputs


@dataclass(frozen=True)
class Pass:
    """A way to improve a calibrated network.

    `run(context, options)` changes its network and returns a note of half a line; `options` are a frozen dataclass with
    defaults, which checks itself (`SelfChecked`). `keeps_function`: the float network computes the same. `sets_ranges`:
    it chooses ranges, which must not be observed again; after a pass that keeps the function and chooses none, they
    are. `judges_itself`: it keeps only changes that improve logits or classes on held-out pictures.
    """

    run: Callable[[PassContext, Any], str]
    options: type[Any]
    keeps_function: bool = False
    sets_ranges: bool = False
    judges_itself: bool = False

    @property
    def observes_again(self) -> bool:
        return self.keeps_function and not self.sets_ranges


def passes() -> dict[str, Pass]:
    """Every pass by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PASS for name in PASSES}


def choosing_ranges(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of a run card's kept passes that chose ranges, to which weights were then fitted."""
    choosing = {name for name, kind in passes().items() if kind.sets_ranges}
    return [one["name"] for one in records if one["kept"] and one["name"] in choosing]
