"""Tiles that `python tools/cuda/tune.py` timed on a GPU, by launch and batch.

The GPU's file in `configs/machines` holds them. Other launches take the default tiles of `kernels.tiles`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.program import Launch, ScalarRef, TensorRef, get_fields, make_kernel
from swin_quant.base.errors import SwinQuantError

FARTHEST = 4  # tiles serve batches up to this many times larger or smaller
# `format_shape(launch)` -> batch -> the fields of its `Tiles`, then microseconds.
TileTable = Mapping[str, Mapping[str, Sequence[float]]]
NO_TILES: TileTable = MappingProxyType({})


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
