"""A network run unit by unit over many pictures: what is kept is the activations at one boundary between units."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from swin_quant.base.progress import track
from swin_quant.quant.watch import watching


class _Reached(Exception):
    def __init__(self, x: Tensor) -> None:
        self.x = x


def entering(model: nn.Module, unit: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
    """What `unit`, the first of a network, is given for each batch of images [B, 3, H, W]."""

    def stop(module: nn.Module, inputs: tuple[Any, ...]) -> NoReturn:
        raise _Reached(inputs[0])

    hook = unit.register_forward_pre_hook(stop)
    try:
        return [_reached(model, batch) for batch in images]
    finally:
        hook.remove()


def _reached(model: nn.Module, batch: Tensor) -> Tensor:
    try:
        model(batch)
    except _Reached as reached:
        return reached.x
    raise ValueError("the unit is no part of the forward pass")


@dataclass(frozen=True)
class UnitRun:
    """A unit, what it is given for each batch of pictures, and what it gives, both in float by the unit `original`."""

    name: str
    unit: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    original: nn.Module


def walk(
    model: nn.Module, units: Mapping[str, nn.Module], images: Sequence[Tensor], original: nn.Module | None = None
) -> Iterator[UnitRun]:
    """Each unit in order; it may be changed before the next is asked for, which is given what it gave unchanged.

    `original`: a copy of the network that says what units are given and give; else it is `model`, as it is.
    """
    original = original or model
    inputs: list[Tensor] = []
    for name, unit in track(list(units.items()), "units", len(units)):
        source = original.get_submodule(name)
        if not inputs:
            with torch.inference_mode():
                inputs = entering(original, source, images)
        outputs = through(source, inputs)
        yield UnitRun(name, unit, inputs, outputs, source)
        inputs = outputs


def inside(name: str, unit: str) -> bool:
    """Whether what is called `name` is of a unit; one without a name is the whole network."""
    return not unit or name.startswith(f"{unit}.")


class UpTo(nn.Module):
    """A network as far as one of its units, `last`: pictures [B, 3, H, W] to what that gives."""

    def __init__(self, model: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, (last,)  # in a tuple, else its parameters had two names

    def forward(self, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        with watching({"last": self.last[0]}, lambda name, module, given, y: found.append(y)):
            self.model(images)
        return found[0]


def given_by(units: Mapping[str, nn.Module], model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What `model` gives, and by name what those parts of it give that are called as `units` are."""
    seen: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        seen[name] = y.float()

    with watching({name: model.get_submodule(name) for name in units}, look):
        return model(images), seen


@torch.inference_mode()
def through(unit: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a unit gives for each batch."""
    return [unit(x) for x in inputs]
