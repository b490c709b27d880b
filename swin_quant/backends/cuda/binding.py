"""Bind a program to memory: place its buffers in one block of a device, and give every kernel its arguments.

On a CPU the kernels' references run, or the kernels themselves where Triton interprets them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch, Program, ScalarRef, TensorRef, get_fields, make_kernel
from swin_quant.base.errors import SwinQuantError

FARTHEST = 4  # tiles serve batches up to this many times larger or smaller
# Tiles that `python tools/cuda/tune.py` timed, in the GPU's file in `configs/machines`; other launches take the default
# tiles of `kernels.tiles`. `format_shape(launch)` -> batch -> the fields of its `Tiles`, then microseconds.
TileTable = Mapping[str, Mapping[str, Sequence[float]]]
NO_TILES: TileTable = MappingProxyType({})


@dataclass(frozen=True)
class Bound:
    """Fill `images` [batch, in, S, S], call it, and read `logits` [batch, classes]; both stay at the same address.

    `buffers`: every buffer by its name. `calls`: one a launch; a call may overwrite buffers that no later call reads.
    """

    images: Tensor
    logits: Tensor
    buffers: Mapping[str, Tensor] = field(repr=False)
    calls: tuple[Callable[[], None], ...] = field(repr=False)

    def __call__(self) -> None:
        for call in self.calls:
            call()


def memory(nbytes: int, device: torch.device) -> Tensor:
    """A block of `nbytes` for a program's buffers; smaller programs may take turns with it."""
    with torch.inference_mode(False):  # later calls outside of inference mode write to it too
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def by_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device, rather than their references."""
    return device.type == "cuda" or by_interpreter()


def by_interpreter() -> bool:
    """Whether Triton is set to interpret kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def bind(
    program: Program,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    device: torch.device,
    tiles: TileTable = NO_TILES,
    block: Tensor | None = None,
) -> Bound:
    """`program` on a device that holds the packed `tensors`. Nothing is allocated after this.

    Kernels run with their `tiles`, or with their defaults. `block`: memory for the buffers (see `memory`).
    """
    known = dict(tensors)
    block = memory(program.nbytes, device) if block is None else block
    with torch.inference_mode(False):
        for name, buffer in program.buffers.items():
            at = program.places[name]
            known[name] = block[at : at + buffer.nbytes].view(buffer.dtype).view(buffer.shape)

    def tensor(ref: TensorRef) -> Tensor:
        found = known[ref.name].view(ref.shape)
        if ref.times is None:
            return found
        return found * (scalars[ref.times.name] if isinstance(ref.times, ScalarRef) else tensor(ref.times))

    launched = by_kernels(device)
    calls: list[Callable[[], None]] = []
    for launch in program.launches:
        kernel = launch.kernel(tensor, scalars.__getitem__)
        own = tiles_for(launch, program.batch, tiles) if launched else None
        calls.append(partial(kernel.launch, own) if launched else kernel.reference)
    buffers = {name: known[name] for name in program.buffers}
    return Bound(buffers[program.images.name], buffers[program.logits.name], buffers, tuple(calls))


def format_shape(launch: Launch) -> str:
    """All that a launch's time depends on except the batch, in one line."""
    words = [f"{word}={_shape(value)}" for word, value in launch.arguments.items()]
    return f"{launch.op} {' '.join(words)}"


def _shape(value: Any) -> str:
    if isinstance(value, TensorRef):
        sides = value.shape if value.packed else value.shape[1:]
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, sides))}]"
    if isinstance(value, ScalarRef | float):
        return "number"
    if inner := get_fields(value):
        return f"({','.join(f'{word}={_shape(part)}' for word, part in inner.items())})"
    return str(value)


def tiles_for(launch: Launch, batch: int, table: TileTable) -> Tiles | None:
    """The tiles of a launch, from the nearest batch that was timed; None if none is near.

    Raises:
        SwinQuantError: The launch's kernel does not take the tiles: the table is older than the kernel.
    """
    timed = {int(other): found for other, found in table.get(format_shape(launch), {}).items()}
    nearest = min(timed, key=lambda other: (max(batch, other) / min(batch, other), -other), default=None)
    if nearest is None or max(batch, nearest) > FARTHEST * min(batch, nearest):
        return None
    tiles = Tiles(*map(int, timed[nearest][:-1]))
    try:
        make_kernel(launch).prepare(tiles)
    except SwinQuantError as error:
        raise SwinQuantError(
            f"configs/machines: tiles of {launch.op}: {error}: run `python tools/cuda/tune.py` again"
        ) from error
    return tiles
