"""Patch embedding, blocks and patch merging on maps [B, H, W, C] of any size."""

from typing import Any

from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, as_linear
from swin_quant.backends.onnx.swin_maps.attention import map_attention
from swin_quant.backends.onnx.swin_maps.operators import map_neighbours, map_patches
from swin_quant.models.swin_v2 import SwinV2Block


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
