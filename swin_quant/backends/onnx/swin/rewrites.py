"""The table of named rewrites of Swin for export: the same function with fewer or cheaper operators.

Each takes the lowered model (`onnx.network`) and changes it in place; the order of the table is that in which they
apply. None changes a number beyond the rounding of float32, and none changes an int8 value of a weight.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from swin_quant.backends.onnx.swin import tokens
from swin_quant.backends.onnx.swin.attention import QuantizedAttention, fusible
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedMerging, OrderedPatchEmbed

Lowered: TypeAlias = Any  # a Swin with some parts replaced by the parts of this folder


def fusible_attention(model: Lowered) -> None:
    """Attention of rank 4 with the scale in q and one additive constant; V2's position MLP is gone."""
    for block in _blocks(model):
        block.attn = fusible(block.attn, block.attn_mask)


def scale_in_weights(model: Lowered) -> None:
    """Fold the scale of V1's attention into q's rows of the qkv weight and bias, which saves an operator."""
    for attention in _attentions(model):
        attention.fold_scale()


def windows_apart(model: Lowered) -> None:
    """Windows in a dimension of their own, not among the heads: fewer transpositions where attention is not fused."""
    for attention in _attentions(model):
        attention.set_apart()


def one_constant(model: Lowered) -> None:
    """Position bias and mask stored as one constant [nW * heads, L, L]; else engines compute it on loading."""
    for attention in _attentions(model):
        attention.bake()


def window_order(model: Lowered) -> None:
    """Tokens stay in the order of windows: no roll, partition or reverse, a gather where the order changes."""
    first = model.layers[0].blocks[0]
    model.patch_embed = OrderedPatchEmbed(model.patch_embed, first.window)
    present = tokens.windows(first.resolution, first.window, 0)
    if model.absolute_pos_embed is not None:
        model.absolute_pos_embed = nn.Parameter(model.absolute_pos_embed[:, present])
    following = [*(layer.blocks[0] for layer in list(model.layers)[1:]), None]
    for layer, then in zip(model.layers, following, strict=True):
        for index, block in enumerate(layer.blocks):
            layer.blocks[index] = OrderedBlock(block, present)
            present = layer.blocks[index].order
        if then is not None:
            merged = tokens.windows(then.resolution, then.window, then.shift)
            layer.downsample = OrderedMerging(layer.downsample, present, merged)
            present = merged


Rewrite = Callable[[Lowered], None]
REWRITES: dict[str, Rewrite] = {
    "fusible-attention": fusible_attention,
    "scale-in-weights": scale_in_weights,
    "windows-apart": windows_apart,
    "one-constant": one_constant,
    "window-order": window_order,
}


def _blocks(model: Lowered) -> list[Any]:
    return [block for layer in model.layers for block in layer.blocks]


def _attentions(model: Lowered) -> list[QuantizedAttention]:
    return [block.attn for block in _blocks(model) if isinstance(block.attn, QuantizedAttention)]
