"""The kernels that a launch list needs: they can be compiled for GPUs that are not here."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from swin_quant.backends.cuda.crosscompile import KernelCall, recorded
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch, ScalarRef, TensorRef, parts_of

SOME_NUMBER = 0.5


def kernels_of(launches: Iterable[Launch]) -> list[KernelCall]:
    """The kernels that launches of the engine need, each once. Nothing is allocated or run."""
    return kernels_with_tiles((launch, None) for launch in launches)


def kernels_with_tiles(wanted: Iterable[tuple[Launch, Tiles | None]]) -> list[KernelCall]:
    """The same with given tiles; None: those that the kernel takes by default."""
    with recorded() as found:
        for launch, tiles in wanted:
            kernel_module(launch).launch(**arguments_of(launch, without_memory), tiles=tiles)
    return found


def kernel_module(launch: Launch) -> ModuleType:
    """The module with the kernel's `reference`, `call` and `launch`."""
    return importlib.import_module(f"swin_quant.backends.cuda.kernels.{launch.op}")


def arguments_of(launch: Launch, tensor: Callable[[TensorRef], torch.Tensor]) -> dict[str, Any]:
    """The launch's arguments, with tensors made by `tensor` and some number for each scalar of the network."""
    made: dict[TensorRef, torch.Tensor] = {}
    for ref in launch.operands.values():
        if ref not in made:  # what a launch changes is one tensor under two words
            made[ref] = tensor(ref)
    return {word: made[value] if isinstance(value, TensorRef) else _number(value) for word, value in
            launch.arguments.items()}  # fmt: skip


def without_memory(ref: TensorRef) -> torch.Tensor:
    """A tensor of the meta device, which has a shape and a type alone."""
    return torch.empty(ref.shape, dtype=ref.dtype, device="meta")


def _number(value: Any) -> Any:
    if isinstance(value, ScalarRef):
        return SOME_NUMBER
    inner = {word: SOME_NUMBER for word, part in parts_of(value).items() if isinstance(part, ScalarRef)}
    return replace(value, **inner) if inner else value
