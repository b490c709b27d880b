"""Patch embedding, blocks and patch merging on tokens in the order of their windows, a permutation of a map's
tokens."""

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear
from swin_quant.backends.onnx.operators import gather
from swin_quant.models.layers import PatchEmbed, PatchMerging, Swin, WindowBlock
from swin_quant.models.maps import window_partition
from swin_quant.models.swin_v2 import SwinV2Block


class Reorder(nn.Module):
    """Put tokens [B, T, C] into another order: x[:, places]."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        self.places: Tensor = nn.Buffer(places)

    def forward(self, x: Tensor) -> Tensor:
        return gather(x, self.places)


def reorder(present: Tensor, wanted: Tensor) -> nn.Module:
    """The module from one order of tokens to another; an identity for equal orders."""
    same = torch.equal(present, wanted)
    return nn.Identity() if same else Reorder(torch.argsort(present)[wanted].int())


class OrderedBlock(nn.Module):
    """A block whose tokens [B, R * R, C] arrive in the order `present` and leave in that of its (shifted) windows."""

    attn: nn.Module
    mlp: nn.Module
    norm1: nn.Module
    norm2: nn.Module
    layernorm_input1_quantizer: nn.Module
    layernorm_input2_quantizer: nn.Module
    add1_local_input_quantizer: nn.Module
    add1_residual_input_quantizer: nn.Module
    add2_local_input_quantizer: nn.Module
    add2_residual_input_quantizer: nn.Module

    def __init__(self, block: WindowBlock, present: Tensor) -> None:
        super().__init__()
        self.order = get_token_order(block)
        self.to_windows = reorder(present, self.order)
        self.norm_last = isinstance(block, SwinV2Block)
        for name, child in block.named_children():
            self.add_module(name, child)

    def attended(self, x: Tensor) -> Tensor:
        """The residual stream between attention and the MLP."""
        x = self.to_windows(x)
        branch = self._branch(x, self.attn, self.norm1, self.layernorm_input1_quantizer).to(x.dtype)
        return self.add1_local_input_quantizer(branch) + self.add1_residual_input_quantizer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        branch = self._branch(x, self.mlp, self.norm2, self.layernorm_input2_quantizer).to(x.dtype)
        return self.add2_local_input_quantizer(branch) + self.add2_residual_input_quantizer(x)

    def _branch(self, x: Tensor, layer: nn.Module, norm: nn.Module, node: nn.Module) -> Tensor:
        return norm(node(layer(x))) if self.norm_last else layer(norm(node(x)))


class OrderedMerging(nn.Module):
    """Patch merging: tokens arrive in the order `present`; those of the next map leave in the order `merged`."""

    def __init__(self, merging: PatchMerging, present: Tensor, merged: Tensor) -> None:
        super().__init__()
        self.tokens = len(present)
        self.to_neighbours = reorder(present, neighbours(merging.resolution, merged))
        self.places: Tensor | None = getattr(self.to_neighbours, "places", torch.arange(self.tokens).int())
        self.reduction, self.norm, self.norm_first = merging.reduction, merging.norm, merging.norm_first

    def forward(self, x: Tensor) -> Tensor:
        _, length, channels = x.shape
        merged = self.to_neighbours(x).view(-1, length // 4, 4 * channels)
        merged = self.reduction(self.norm(merged)) if self.norm_first else self.norm(self.reduction(merged))
        return merged.to(x.dtype)


class OrderedPatchEmbed(nn.Module):
    """Patch embedding whose tokens leave in the order of windows: one transposition cuts patches and orders them."""

    def __init__(self, embed: PatchEmbed, window: int, order: Tensor) -> None:
        super().__init__()
        self.order: Tensor | None = order
        self.proj, self.norm = Linear(as_linear(embed.proj)), embed.norm
        self.patch, self.window = embed.proj.kernel_size[0], window
        self.stream = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        patch, side = self.patch, self.window
        x = x.view(-1, channels, height // patch // side, side, patch, width // patch // side, side, patch)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, height * width // patch**2, channels * patch**2)
        return self.norm(self.proj(x)).to(self.stream)


class FlatPatchEmbed(nn.Module):
    """The same for one picture, with no tensor above rank 5: patches are cut row by row, then gathered."""

    def __init__(self, ordered: OrderedPatchEmbed) -> None:
        super().__init__()
        self.proj, self.norm, self.patch = ordered.proj, ordered.norm, ordered.patch
        self.places: Tensor = nn.Buffer(ordered.order.int() if ordered.order is not None else torch.arange(0))

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        rows, columns = height // self.patch, width // self.patch
        x = x.view(channels, rows, self.patch, columns, self.patch).permute(1, 3, 0, 2, 4)
        x = gather(x.reshape(1, rows * columns, channels * self.patch**2), self.places)
        return self.norm(self.proj(x))


def as_linear(conv: nn.Conv2d) -> nn.Linear:
    """A convolution of patches that do not overlap, as a product: [..., in * patch * patch] -> [..., out]."""
    linear = nn.Linear(conv.weight[0].numel(), len(conv.weight), bias=conv.bias is not None)
    linear.weight = nn.Parameter(conv.weight.flatten(1))
    if conv.bias is not None:
        linear.bias = nn.Parameter(conv.bias)
    return linear


class SwinNetwork(nn.Module):
    """Pictures [B, in, S, S] -> logits [B, classes], both of `io_type`; submodules keep the trained model's names."""

    def __init__(self, model: Swin, io_type: torch.dtype) -> None:
        super().__init__()
        self.patch_embed, self.layers, self.norm, self.head = model.patch_embed, model.layers, model.norm, model.head
        position = model.absolute_pos_embed
        self.position: Tensor | None = None if position is None else nn.Buffer(position.detach())
        self.io_type = io_type

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        if self.position is not None:
            x = x + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1)).to(self.io_type)


def windows(side: int, window: int, shift: int) -> Tensor:
    """Window by window, after rolling the map up and left by `shift`."""
    numbers = torch.roll(torch.arange(side * side).view(1, side, side, 1), (-shift, -shift), dims=(1, 2))
    return window_partition(numbers, window).flatten()


def get_token_order(block: WindowBlock) -> Tensor:
    """The order of the tokens that leave a block."""
    return windows(block.resolution, block.window, block.shift)


def neighbours(side: int, merged: Tensor) -> Tensor:
    """The order before patch merging: the four tokens of each token of the next map, whose order is `merged`.

    `side`: of the map before merging. The four come as (0, 0), (1, 0), (0, 1), (1, 1): docs/reference, section 1.2.
    """
    groups = torch.arange(side * side).view(side // 2, 2, side // 2, 2).permute(0, 2, 3, 1).reshape(-1, 4)
    return groups[merged].flatten()
