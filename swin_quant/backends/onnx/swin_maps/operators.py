"""Operators for the steps that depend on a map's height and width, with their translations to ONNX.

torch's exporter would have to prove that windows divide a padded map of unknown size. To it each of these is one
operator instead, whose translation computes with the actual shape. In torch each runs the trained model's own code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from swin_quant.models.maps import Cut, neighbours, patches

_END = 2**31 - 1  # the end of a slice without one


@torch.library.custom_op("swin_quant::map_patches", mutates_args=())
def map_patches(images: Tensor, patch: int) -> Tensor:
    """`models.maps.patches`."""
    return _own(patches(images, patch))


@torch.library.custom_op("swin_quant::map_neighbours", mutates_args=())
def map_neighbours(x: Tensor) -> Tensor:
    """`models.maps.neighbours`."""
    return _own(neighbours(x))


@torch.library.custom_op("swin_quant::map_windows", mutates_args=())
def map_windows(x: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Tensor:
    """`Cut.partition`."""
    return _own(Cut(_pair(window), _pair(shift), pad_first).partition(x))


@torch.library.custom_op("swin_quant::map_join", mutates_args=())
def map_join(windows: Tensor, like: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Tensor:
    """`Cut.reverse`."""
    return _own(Cut(_pair(window), _pair(shift), pad_first).reverse(windows, like))


@torch.library.custom_op("swin_quant::map_mask", mutates_args=())
def map_mask(like: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """`Cut.mask` of a shifted cut."""
    mask = Cut(_pair(window), _pair(shift)).mask(like)
    if mask is None:
        raise ValueError("windows that are not shifted have no mask")
    return mask


def _own(x: Tensor) -> Tensor:
    """A copy: an operator's result may be no view of its input, as that of one window on a map is."""
    return x.clone(memory_format=torch.contiguous_format)


def _pair(sides: Sequence[int]) -> tuple[int, int]:
    high, wide = sides
    return high, wide


def _times(size: Any, of: int) -> Any:
    return (size + of - 1) // of


@map_patches.register_fake
def _(images: Tensor, patch: int) -> Tensor:
    batch, channels, height, width = images.shape
    return images.new_empty(batch, _times(height, patch), _times(width, patch), channels * patch * patch)


@map_neighbours.register_fake
def _(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    return x.new_empty(batch, _times(height, 2), _times(width, 2), 4 * channels)


@map_windows.register_fake
def _(x: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Tensor:
    (batch, height, width, channels), (high, wide) = x.shape, window
    return x.new_empty(batch, _times(height, high) * _times(width, wide), high * wide, channels)


@map_join.register_fake
def _(windows: Tensor, like: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Tensor:
    return windows.new_empty(like.shape)


@map_mask.register_fake
def _(like: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor:
    high, wide = window
    count = _times(like.shape[1], high) * _times(like.shape[2], wide)
    return like.new_empty(count, high * wide, high * wide, dtype=torch.float32)


def translations() -> dict[Any, Callable[..., Any]]:
    """For `torch.onnx.export(custom_translation_table=...)`."""
    import numpy as np
    from onnx.numpy_helper import from_array
    from onnxscript import opset18

    op: Any = opset18

    def ints(*values: int) -> Any:
        return op.Constant(value=from_array(np.array(values, np.int64)))

    def size(x: Any, axis: int) -> Any:
        return op.Shape(x, start=axis, end=axis + 1)

    def missing(length: Any, multiple: int) -> Any:
        """How much `length` [1] lacks to a multiple."""
        return op.Mod(op.Sub(ints(multiple), op.Mod(length, ints(multiple))), ints(multiple))

    def padded(x: Any, multiple: Sequence[int]) -> Any:
        below, right, none = missing(size(x, 1), multiple[0]), missing(size(x, 2), multiple[1]), ints(0)
        return op.Pad(x, op.Concat(none, none, none, none, none, below, right, none, axis=0))

    def rolled(x: Any, axis: int, by: Any) -> Any:
        """`x` rolled by `by` [1] places up or left; as in torch, `by` may exceed the length."""
        by = op.Mod(by, size(x, axis))
        begin, end, along = ints(0), ints(_END), ints(axis)
        return op.Concat(op.Slice(x, by, end, along), op.Slice(x, begin, by, along), axis=axis)

    def shifted(x: Any, shift: Sequence[int], back: bool = False) -> Any:
        for axis, by in ((axis, by) for axis, by in zip((1, 2), shift, strict=True) if by):
            x = rolled(x, axis, op.Sub(size(x, axis), op.Mod(ints(by), size(x, axis))) if back else ints(by))
        return x

    def blocks(x: Any, high: int, wide: int) -> Any:
        """[B, H, W, C] -> [B, H / high, high, W / wide, wide, C]."""
        rows, columns = op.Div(size(x, 1), ints(high)), op.Div(size(x, 2), ints(wide))
        return op.Reshape(x, op.Concat(size(x, 0), rows, ints(high), columns, ints(wide), size(x, 3), axis=0))

    def cut(x: Any, window: Sequence[int]) -> Any:
        """[B, H, W, C] -> [B, nW, L, C]."""
        apart = op.Transpose(blocks(x, *window), perm=[0, 1, 3, 2, 4, 5])
        return op.Reshape(apart, op.Concat(size(x, 0), ints(-1, math.prod(window)), size(x, 3), axis=0))

    def of_patches(images: Any, patch: int) -> Any:
        x = blocks(padded(op.Transpose(images, perm=[0, 2, 3, 1]), (patch, patch)), patch, patch)
        x = op.Transpose(x, perm=[0, 1, 3, 5, 2, 4])
        channels = op.Mul(size(images, 1), ints(patch * patch))
        return op.Reshape(x, op.Concat(size(x, 0), size(x, 1), size(x, 2), channels, axis=0))

    def of_neighbours(x: Any) -> Any:
        four = op.Transpose(blocks(padded(x, (2, 2)), 2, 2), perm=[0, 1, 3, 4, 2, 5])
        channels = op.Mul(size(x, 3), ints(4))
        return op.Reshape(four, op.Concat(size(four, 0), size(four, 1), size(four, 2), channels, axis=0))

    def of_windows(x: Any, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Any:
        x = padded(x, window) if pad_first else x
        x = shifted(x, shift)
        return cut(x if pad_first else padded(x, window), window)

    def whole(like: Any, window: Sequence[int]) -> tuple[Any, Any]:
        """Height and width [1] of the map `like` once its windows are whole."""
        high, wide = (op.Add(size(like, at), missing(size(like, at), window[at - 1])) for at in (1, 2))
        return high, wide

    def of_join(windows: Any, like: Any, window: Sequence[int], shift: Sequence[int], pad_first: bool) -> Any:
        (high, wide), channels = whole(like, window), size(like, 3)
        rows, columns = op.Div(high, ints(window[0])), op.Div(wide, ints(window[1]))
        x = op.Reshape(windows, op.Concat(size(like, 0), rows, columns, ints(*window), channels, axis=0))
        x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
        x = op.Reshape(x, op.Concat(size(like, 0), high, wide, channels, axis=0))
        inside = ints(0, 0), op.Concat(size(like, 1), size(like, 2), axis=0), ints(1, 2)
        if not pad_first:
            return shifted(op.Slice(x, *inside), shift, back=True)
        return op.Slice(shifted(x, shift, back=True), *inside)

    def band(length: Any, window: int, shift: int) -> Any:
        """float [length]: the number, 0 to 2, of the part of a shifted axis that each place belongs to."""
        scalar = op.Squeeze(length, ints(0))
        zero, one = (op.Constant(value=from_array(np.array(value, np.int64))) for value in (0, 1))
        places = op.Range(zero, scalar, one)
        parts = [op.GreaterOrEqual(places, op.Sub(length, ints(end))) for end in (window, shift)]
        return op.Add(*(op.Cast(part, to=1) for part in parts))

    def of_mask(like: Any, window: Sequence[int], shift: Sequence[int]) -> Any:
        high, wide = whole(like, window)
        three = op.Constant(value=from_array(np.array(3, np.float32)))
        down = op.Mul(op.Unsqueeze(band(high, window[0], shift[0]), ints(1)), three)
        region = op.Add(down, op.Unsqueeze(band(wide, window[1], shift[1]), ints(0)))
        windows = op.Squeeze(cut(op.Unsqueeze(region, ints(0, 3)), window), ints(0, 3))
        same = op.Equal(op.Unsqueeze(windows, ints(2)), op.Unsqueeze(windows, ints(1)))
        allowed, masked = (op.Constant(value=from_array(np.array(value, np.float32))) for value in (0, -100))
        return op.Where(same, allowed, masked)

    ops = torch.ops.swin_quant
    return {
        ops.map_patches.default: of_patches,
        ops.map_neighbours.default: of_neighbours,
        ops.map_windows.default: of_windows,
        ops.map_join.default: of_join,
        ops.map_mask.default: of_mask,
    }
