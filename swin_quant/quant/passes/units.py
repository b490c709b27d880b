"""Run a network unit by unit over many pictures, keeping the activations of one boundary between units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from swin_quant.quant.outputs import Output, rows
from swin_quant.quant.watch import watching


class _Reached(Exception):
    """Ends a forward pass at the unit whose input it carries."""


def entering(model: nn.Module, unit: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
    """The input of `unit`, a network's first, for each batch of images [B, 3, H, W]."""

    def stop(module: nn.Module, inputs: tuple[Any, ...]) -> NoReturn:
        raise _Reached(inputs[0])

    found: list[Tensor] = []
    with unit.register_forward_pre_hook(stop):
        for batch in images:
            try:
                model(batch)
            except _Reached as reached:
                found.append(reached.args[0])
            else:
                raise ValueError("the unit is no part of the forward pass")
    return found


@dataclass(frozen=True)
class UnitRun:
    """A unit, with the inputs and outputs of the float unit `original` for each batch of pictures."""

    name: str
    unit: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    original: nn.Module


def inside(name: str, unit: str) -> bool:
    """Whether `name` is inside a unit; the unit without a name is the whole network."""
    return not unit or name.startswith(f"{unit}.")


def given_by(units: Mapping[str, nn.Module], model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of `model`, and the outputs of its `units` by name."""
    seen: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], y: Output) -> None:
        seen[name] = _joined(y).float()

    with watching({name: model.get_submodule(name) for name in units}, look):
        return model(images), seen


@torch.inference_mode()
def through(unit: Callable[[Tensor], Output], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output of a unit for each batch; several outputs, of a whole network, are concatenated, [B, N]."""
    return [_joined(unit(x)) for x in inputs]


def _joined(output: Output) -> Tensor:
    return output if isinstance(output, Tensor) else rows(output)
