"""Swins on maps as they are exported: of any height and width, cut into windows by ONNX operators."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.operators import gather
from swin_quant.backends.onnx.rewriting import Rewriter
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention, norm
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, as_linear
from swin_quant.backends.onnx.swin.rewrites import scale_in_weights
from swin_quant.backends.onnx.swin_maps.operators import (
    map_join,
    map_mask,
    map_neighbours,
    map_patches,
    map_windows,
    translations,
)
from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import FEATURES
from swin_quant.models.swin_v2 import SwinV2Block, WindowAttentionV2


class MapAttention(QuantizedAttention):
    """Attention of V1 inside the windows of a map [B, H, W, C]; the result has the map's shape."""

    def __init__(self, attn: Any, cut: Any) -> None:
        super().__init__(attn, None)
        self.cut = cut

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is ignored: it is computed from the map."""
        cut = self.cut
        windows = map_windows(x, cut.window, cut.shift, cut.pad_first)
        mask = map_mask(x, cut.window, cut.shift) if any(cut.shift) else None
        return map_join(self.inside(windows, mask), x, cut.window, cut.shift, cut.pad_first)

    def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [B, nW, L, C], mask: [nW, L, L] or None; the result has x's shape."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # [3, B, nW, heads, L, D]
        together = (0, 1) if mask is None else (1, 2)
        q, k, v = (part.flatten(*together) for part in qkv.unbind())
        q, k = self.scaled(q, k)
        logits = self.softmax_input_quantizer(q @ k) + self.constant(mask)
        attention = self.matmul_a_input_quantizer(logits.softmax(dim=-1))
        mixed = attention @ self.matmul_v_input_quantizer(v)
        mixed = mixed.view(x.shape[0], x.shape[1], self.heads, self.length, mixed.shape[-1])
        return self.proj(mixed.transpose(2, 3).flatten(3))

    def constant(self, mask: Tensor | None) -> Tensor:
        """[heads, L, L], or [nW * heads, L, L] with a mask."""
        bias = self.table if self.index is None else gather(self.table, self.index)
        return bias if mask is None else (bias + mask[:, None]).flatten(0, 1)


class MapCosineAttention(MapAttention, CosineAttention):
    """Attention of V2: all windows of a head share its scale."""

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.matmul_q_input_quantizer(q), self.matmul_k_input_quantizer(k)
        by_head = (q / norm(q)).view(-1, self.heads, *q.shape[-2:]) * self.head_scale
        return self.mha_q_input_quantizer(by_head.view_as(q)), self.mha_k_input_quantizer(
            (k / norm(k)).transpose(-2, -1)
        )


def map_attention(attn: Any, cut: Any) -> MapAttention:
    """The exported attention for V1 or V2."""
    return (MapCosineAttention if isinstance(attn, WindowAttentionV2) else MapAttention)(attn, cut)


class LoweredMapBlock(OrderedBlock):
    """A block whose tokens stay where they are: its attention cuts the windows and joins them."""

    def __init__(self, block: Any) -> None:
        nn.Module.__init__(self)
        self.to_windows = nn.Identity()
        self.norm_last = isinstance(block, SwinV2Block)
        for name, child in block.named_children():
            self.add_module(name, map_attention(child, block.cut) if name == "attn" else child)


class MapMerge(nn.Module):
    """Patch merging: [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), 2C]."""

    def __init__(self, merging: Any) -> None:
        super().__init__()
        self.reduction, self.norm, self.norm_first = merging.reduction, merging.norm, merging.norm_first

    def forward(self, x: Tensor) -> Tensor:
        x = map_neighbours(x)
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x))


class MapPatches(nn.Module):
    """Patch embedding: [B, in, H, W] -> [B, ceil(H / patch), ceil(W / patch), C]."""

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.proj, self.norm = Linear(as_linear(embed.proj)), embed.norm
        self.patch = embed.proj.kernel_size[0]

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(map_patches(images, self.patch)))


class MapNetwork(nn.Module):
    """From pictures [B, in, H, W] of `io_type` to the maps of all stages; submodules keep the trained model's names."""

    patch_embed: Any
    layers: Any

    def __init__(self, model: Any, io_type: torch.dtype) -> None:
        super().__init__()
        if not isinstance(model.patch_embed, MapPatches):
            raise UsageError("maps are exported with the rewrite any-size: give it, too")
        for name, child in model.named_children():
            self.add_module(name, child)
        self.io_type = io_type

    def maps(self, images: Tensor) -> Iterator[Tensor]:
        """The map [B, h, w, C] of each stage."""
        x = self.patch_embed(images.float())
        for layer in self.layers:
            for block in layer.blocks:
                x = block(x)
            yield x
            if layer.downsample is not None:
                x = layer.downsample(x)


class BackboneNetwork(MapNetwork):
    """Pictures [B, in, H, W] -> maps [B, C, h, w] of some stages, all of `io_type`."""

    def __init__(self, model: Any, io_type: torch.dtype) -> None:
        super().__init__(model, io_type)
        self.stages, self.normed = model.output_stages, model.normed

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps = ((stage, x) for stage, x in enumerate(self.maps(images)) if stage in self.stages)
        return tuple(self.normed(x, stage).permute(0, 3, 1, 2).to(self.io_type) for stage, x in maps)


class ClassifierNetwork(MapNetwork):
    """Pictures [B, in, H, W] -> logits [B, classes], both of `io_type`."""

    norm: Any
    head: Any

    def forward(self, images: Tensor) -> Tensor:
        *_, last = self.maps(images)
        return self.head(self.norm(last).mean(dim=(1, 2))).to(self.io_type)


def network_of(model: Any, io_type: torch.dtype) -> MapNetwork:
    """The network to export, for what the model gives."""
    return (BackboneNetwork if model.output_kind == FEATURES else ClassifierNetwork)(model, io_type)


def any_size(model: Any) -> None:
    """Windows, patches and their merging as operators that compute with the picture's size, and attention of rank 4."""
    model.patch_embed = MapPatches(model.patch_embed)
    for layer in model.layers:
        for index, block in enumerate(layer.blocks):
            layer.blocks[index] = LoweredMapBlock(block)
        if layer.downsample is not None:
            layer.downsample = MapMerge(layer.downsample)


REWRITER = Rewriter(
    {"any-size": any_size, "scale-in-weights": scale_in_weights},
    network_of,
    builds_on="any-size",
    translations=translations,
)
