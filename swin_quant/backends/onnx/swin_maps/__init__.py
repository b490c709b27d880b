"""Swins on maps as they are exported: of any height and width, cut into windows by ONNX operators.

torch's exporter would have to prove that windows divide a padded map of unknown size. So each step that depends on a
map's height and width is one operator to it, whose translation computes with the actual shape. In torch each runs the
trained model's own code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.network import Rewriter
from swin_quant.backends.onnx.operators import constant, operator
from swin_quant.backends.onnx.swin import REWRITES
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention, norm
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedMerging, OrderedPatchEmbed, as_linear
from swin_quant.backends.onnx.swin.int8_operators import MAP_BRANCH, PLUGINS, OperatorEmbedding
from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import FEATURES
from swin_quant.models.maps import Cut, neighbours, patches
from swin_quant.models.swin_v2 import SwinV2Block, WindowAttentionV2

_END = 2**31 - 1  # the end of a slice without one


def _own(x: Tensor) -> Tensor:
    """A copy: an operator's result may be no view of its input, as that of one window on a map is."""
    return x.clone(memory_format=torch.contiguous_format)


def _make_cut(window: Sequence[int], shift: Sequence[int], pad_first: bool = False, rests: bool = False) -> Cut:
    (high, wide), (down, right) = window, shift
    return Cut((high, wide), (down, right), pad_first, rests)


def _shrink(x: Tensor, high: int, wide: int) -> tuple[Any, Any, Any]:
    """Batch, and how many blocks of this size cover height and width of a map [B, H, W, C]."""
    return x.shape[0], (x.shape[1] + high - 1) // high, (x.shape[2] + wide - 1) // wide


@operator(lambda images, patch: images.new_empty(
    *_shrink(images.permute(0, 2, 3, 1), patch, patch), images.shape[1] * patch * patch
))  # fmt: skip
def map_patches(images: Tensor, patch: int) -> Tensor:
    """`models.maps.patches`."""
    return _own(patches(images, patch))


@operator(lambda x: x.new_empty(*_shrink(x, 2, 2), 4 * x.shape[3]))
def map_neighbours(x: Tensor) -> Tensor:
    """`models.maps.neighbours`."""
    return _own(neighbours(x))


def _fake_windows(x: Tensor, window: Sequence[int], *_: Any, **__: Any) -> Tensor:
    batch, rows, columns = _shrink(x, *window)
    return x.new_empty(batch, rows * columns, math.prod(window), x.shape[3])


@operator(_fake_windows)
def map_windows(x: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool, rests: bool = False) -> Tensor:
    """`Cut.partition`."""
    return _own(_make_cut(window, shift, pad_first, rests).partition(x))


@operator(lambda windows, like, *_, **__: windows.new_empty(like.shape))
def map_join(
    windows: Tensor, like: Tensor, window: Sequence[int], shift: Sequence[int], pad_first: bool, rests: bool = False
) -> Tensor:
    """`Cut.reverse`."""
    return _own(_make_cut(window, shift, pad_first, rests).reverse(windows, like))


def _fake_mask(like: Tensor, window: Sequence[int], *_: Any, **__: Any) -> Tensor:
    _batch, rows, columns = _shrink(like, *window)
    return like.new_empty(rows * columns, *[math.prod(window)] * 2, dtype=torch.float32)


@operator(_fake_mask)
def map_mask(like: Tensor, window: Sequence[int], shift: Sequence[int], rests: bool = False) -> Tensor:
    """`Cut.mask` of a shifted cut; zeros for a map that rests."""
    mask = (cut := _make_cut(window, shift, rests=rests)).mask(like)
    count = cut.partition(like[:1, :, :, :1]).shape[1]
    return like.new_zeros(count, *[math.prod(window)] * 2, dtype=torch.float32) if mask is None else mask


def translations() -> dict[Any, Callable[..., Any]]:
    """For `torch.onnx.export(custom_translation_table=...)`."""
    from onnxscript import opset18

    op: Any = opset18

    def ints(*values: int) -> Any:
        return constant(values, np.int64)

    def size(x: Any, axis: int) -> Any:
        return op.Shape(x, start=axis, end=axis + 1)

    def missing(length: Any, multiple: int) -> Any:
        """How much `length` [1] lacks to a multiple."""
        return op.Mod(op.Sub(ints(multiple), op.Mod(length, ints(multiple))), ints(multiple))

    def padded(x: Any, multiple: Sequence[int]) -> Any:
        below, right, none = missing(size(x, 1), multiple[0]), missing(size(x, 2), multiple[1]), ints(0)
        return op.Pad(x, op.Concat(none, none, none, none, none, below, right, none, axis=0))

    def shifts(like: Any, window: Sequence[int], shift: Sequence[int], rests: bool) -> list[Any]:
        """`Cut.choose_shift`, each [1]; None without a shift."""
        found = [ints(by) if by else None for by in shift]
        if not rests:
            return found
        moves = op.Cast(op.Greater(op.Min(size(like, 1), size(like, 2)), ints(window[0])), to=7)
        return [None if by is None else op.Mul(by, moves) for by in found]

    def shifted(x: Any, shift: Sequence[Any], back: bool = False) -> Any:
        """`x` rolled up and left, or back; as in torch, a shift may exceed the length."""
        for axis, by in ((axis, by) for axis, by in zip((1, 2), shift, strict=True) if by is not None):
            by = op.Sub(size(x, axis), op.Mod(by, size(x, axis))) if back else by
            by = op.Mod(by, size(x, axis))
            begin, end, along = ints(0), ints(_END), ints(axis)
            x = op.Concat(op.Slice(x, by, end, along), op.Slice(x, begin, by, along), axis=axis)
        return x

    def blocks(x: Any, high: int, wide: int) -> Any:
        """[B, H, W, C] -> [B, H / high, high, W / wide, wide, C]."""
        rows, columns = op.Div(size(x, 1), ints(high)), op.Div(size(x, 2), ints(wide))
        return op.Reshape(x, op.Concat(size(x, 0), rows, ints(high), columns, ints(wide), size(x, 3), axis=0))

    def cut(x: Any, window: Sequence[int]) -> Any:
        """[B, H, W, C] -> [B, nW, L, C]."""
        apart = op.Transpose(blocks(x, *window), perm=[0, 1, 3, 2, 4, 5])
        return op.Reshape(apart, op.Concat(size(x, 0), ints(-1, math.prod(window)), size(x, 3), axis=0))

    def export_patches(images: Any, patch: int) -> Any:
        x = blocks(padded(op.Transpose(images, perm=[0, 2, 3, 1]), (patch, patch)), patch, patch)
        x = op.Transpose(x, perm=[0, 1, 3, 5, 2, 4])
        channels = op.Mul(size(images, 1), ints(patch * patch))
        return op.Reshape(x, op.Concat(size(x, 0), size(x, 1), size(x, 2), channels, axis=0))

    def export_neighbours(x: Any) -> Any:
        four = op.Transpose(blocks(padded(x, (2, 2)), 2, 2), perm=[0, 1, 3, 4, 2, 5])
        channels = op.Mul(size(x, 3), ints(4))
        return op.Reshape(four, op.Concat(size(four, 0), size(four, 1), size(four, 2), channels, axis=0))

    def export_windows(
        x: Any, window: Sequence[int], shift: Sequence[int], pad_first: bool, rests: bool = False
    ) -> Any:
        by = shifts(x, window, shift, rests)
        x = shifted(padded(x, window) if pad_first else x, by)
        return cut(x if pad_first else padded(x, window), window)

    def whole(like: Any, window: Sequence[int]) -> tuple[Any, Any]:
        """Height and width [1] of the map `like` once its windows are whole."""
        high, wide = (op.Add(size(like, at), missing(size(like, at), window[at - 1])) for at in (1, 2))
        return high, wide

    def export_join(
        windows: Any, like: Any, window: Sequence[int], shift: Sequence[int], pad_first: bool, rests: bool = False
    ) -> Any:
        (high, wide), channels, by = whole(like, window), size(like, 3), shifts(like, window, shift, rests)
        rows, columns = op.Div(high, ints(window[0])), op.Div(wide, ints(window[1]))
        x = op.Reshape(windows, op.Concat(size(like, 0), rows, columns, ints(*window), channels, axis=0))
        x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
        x = op.Reshape(x, op.Concat(size(like, 0), high, wide, channels, axis=0))
        inside = ints(0, 0), op.Concat(size(like, 1), size(like, 2), axis=0), ints(1, 2)
        if not pad_first:
            return shifted(op.Slice(x, *inside), by, back=True)
        return op.Slice(shifted(x, by, back=True), *inside)

    def band(length: Any, window: int, shift: Any) -> Any:
        """float [length]: the number, 0 to 2, of the part of a shifted axis that each place belongs to."""
        end = op.Squeeze(length, ints(0))
        places = op.Range(constant(0), end, constant(1))
        parts = [op.GreaterOrEqual(places, op.Sub(length, by)) for by in (ints(window), shift)]
        return op.Add(*(op.Cast(part, to=1) for part in parts))

    def export_mask(like: Any, window: Sequence[int], shift: Sequence[int], rests: bool = False) -> Any:
        high, wide = whole(like, window)
        down_by, right_by = (ints(0) if by is None else by for by in shifts(like, window, shift, rests))
        three = constant(3, np.float32)
        down = op.Mul(op.Unsqueeze(band(high, window[0], down_by), ints(1)), three)
        region = op.Add(down, op.Unsqueeze(band(wide, window[1], right_by), ints(0)))
        windows = op.Squeeze(cut(op.Unsqueeze(region, ints(0, 3)), window), ints(0, 3))
        same = op.Equal(op.Unsqueeze(windows, ints(2)), op.Unsqueeze(windows, ints(1)))
        return op.Where(same, constant(0, np.float32), constant(-100, np.float32))

    ops = torch.ops.swin_quant
    return {
        ops.map_patches.default: export_patches,
        ops.map_neighbours.default: export_neighbours,
        ops.map_windows.default: export_windows,
        ops.map_join.default: export_join,
        ops.map_mask.default: export_mask,
    }


class MapAttention(QuantizedAttention):
    """Attention of V1 inside the windows of a map [B, H, W, C]; the result has the map's shape."""

    def __init__(self, attn: Any, cut: Any) -> None:
        super().__init__(attn, None)
        self.cut = cut

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is ignored: it is computed from the map."""
        cut = self.cut
        windows = map_windows(x, cut.window, cut.shift, cut.pad_first, cut.rests)
        mask = map_mask(x, cut.window, cut.shift, cut.rests) if any(cut.shift) else None
        return map_join(self.inside(windows, mask), x, cut.window, cut.shift, cut.pad_first, cut.rests)

    def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [B, nW, L, C], mask: [nW, L, L] or None; the result has x's shape."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # [3, B, nW, heads, L, D]
        together = (0, 1) if mask is None else (1, 2)
        q, k, v = (part.flatten(*together) for part in qkv.unbind())
        q, k = self.scaled(q, k)
        logits = self.softmax_input_quantizer(q @ k)
        bias = self.addend()  # [heads, L, L], or [nW * heads, L, L] with a mask
        logits = logits + (bias if mask is None else (bias + mask[:, None]).flatten(0, 1))
        attention = self.matmul_a_input_quantizer(logits.softmax(dim=-1))
        mixed = attention @ self.matmul_v_input_quantizer(v)
        mixed = mixed.view(x.shape[0], x.shape[1], self.heads, self.length, mixed.shape[-1])
        return self.proj(mixed.transpose(2, 3).flatten(3))


class MapCosineAttention(MapAttention, CosineAttention):
    """Attention of V2: all windows of a head share its scale."""

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.matmul_q_input_quantizer(q), self.matmul_k_input_quantizer(k)
        by_head = ((q / norm(q)).view(-1, self.heads, *q.shape[-2:]) * self.head_scale).view_as(q)
        return self.mha_q_input_quantizer(by_head), self.mha_k_input_quantizer((k / norm(k)).transpose(-2, -1))


class LoweredMapBlock(OrderedBlock):
    """A block whose tokens stay where they are: its attention cuts the windows and joins them."""

    def __init__(self, block: Any) -> None:
        nn.Module.__init__(self)
        self.to_windows = nn.Identity()
        self.norm_last = isinstance(block, SwinV2Block)
        for name, child in block.named_children():
            self.add_module(name, child)
        attention = MapCosineAttention if isinstance(block.attn, WindowAttentionV2) else MapAttention
        self.attn = attention(block.attn, block.cut)


class MapMerge(OrderedMerging):
    """Patch merging: [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), 2C]."""

    def __init__(self, merging: Any) -> None:
        nn.Module.__init__(self)
        self.places = None  # the map tells
        self.reduction, self.norm, self.norm_first = merging.reduction, merging.norm, merging.norm_first

    def forward(self, x: Tensor) -> Tensor:
        x = map_neighbours(x)
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x))


class MapPatches(OrderedPatchEmbed):
    """Patch embedding: [B, in, H, W] -> [B, ceil(H / patch), ceil(W / patch), C]."""

    def __init__(self, embed: Any) -> None:
        nn.Module.__init__(self)
        self.order = None  # row by row
        self.proj, self.norm = Linear(as_linear(embed.proj)), embed.norm
        self.patch = embed.proj.kernel_size[0]

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(map_patches(images, self.patch)))


class MapNetwork(nn.Module):
    """From pictures [B, in, H, W] to maps [B, C, h, w] of some stages, or to logits [B, classes], all of `io_type`.

    Submodules keep the trained model's names.
    """

    patch_embed: Any
    layers: Any
    norm: Any
    head: Any

    def __init__(self, model: Any, io_type: torch.dtype) -> None:
        super().__init__()
        if not isinstance(model.patch_embed, MapPatches | OperatorEmbedding):
            raise UsageError("maps are exported with the rewrite any-size: give it, too")
        for name, child in model.named_children():
            self.add_module(name, child)
        self.io_type = io_type
        self.stages = model.output_stages if model.output_kind == FEATURES else None
        self.normed = getattr(model, "normed", None)

    def forward(self, images: Tensor) -> Any:
        x, maps = self.patch_embed(images.float()), []
        for stage, layer in enumerate(self.layers):
            for block in layer.blocks:
                x = block(x)
            if self.normed and self.stages and stage in self.stages:
                maps.append(self.normed(x, stage).permute(0, 3, 1, 2).to(self.io_type))
            if layer.downsample is not None:
                x = layer.downsample(x)
        return tuple(maps) if self.stages else self.head(self.norm(x).mean(dim=(1, 2))).to(self.io_type)


def any_size(model: Any) -> None:
    """Windows, patches and their merging as operators that compute with the picture's size, and attention of rank 4."""
    model.patch_embed = MapPatches(model.patch_embed)
    for layer in model.layers:
        for index, block in enumerate(layer.blocks):
            layer.blocks[index] = LoweredMapBlock(block)
        if layer.downsample is not None:
            layer.downsample = MapMerge(layer.downsample)


REWRITER = Rewriter(
    {"any-size": any_size, "scale-in-weights": REWRITES["scale-in-weights"]},
    MapNetwork,
    builds_on="any-size",
    plugins={"map_branch": MAP_BRANCH} | PLUGINS,
    translations=translations,
)
