"""Swin V1 and V2 as exported: a table of named rewrites, the same function with fewer or cheaper operators.

Each takes the lowered model (`onnx.network`) and changes it in place; the order of the table is that in which they
apply. None changes a number beyond the rounding of float32, and none changes an int8 value of a weight. `restored`
undoes them in a file's tensors: the order of tokens, and the place of attention's scale.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.network import Restore, Rewriter
from swin_quant.backends.onnx.swin.attention import QuantizedAttention, fusible
from swin_quant.backends.onnx.swin.attention_operator import ATTENTION, ATTENTION_BRANCH
from swin_quant.backends.onnx.swin.blocks import (
    FlatPatchEmbed,
    OrderedBlock,
    OrderedMerging,
    OrderedPatchEmbed,
    SwinNetwork,
    get_token_order,
    windows,
)
from swin_quant.backends.onnx.swin.half import halve
from swin_quant.backends.onnx.swin.int8_operators import MLP, PATCH_EMBEDDING, PATCH_MERGING
from swin_quant.models.layers import Swin, WindowBlock
from swin_quant.models.swin_v2 import SwinV2Block

Lowered: TypeAlias = Any  # a Swin with some parts replaced by the parts of this folder


def fusible_attention(model: Lowered) -> None:
    """Attention of rank 4 with the scale in q and one additive constant; V2's position MLP is gone."""
    for layer in model.layers:
        for block in layer.blocks:
            block.attn = fusible(block.attn, block.attn_mask)


def scale_in_weights(model: Lowered) -> None:
    """Fold the scale of V1's attention into q's rows of the qkv weight and bias, which saves an operator."""
    for attention in _attentions(model):
        attention.fold_scale()


def windows_apart(model: Lowered) -> None:
    """Windows in a dimension of their own, not among the heads: fewer transpositions where attention is not fused."""
    for attention in _attentions(model):
        attention.set_apart()


def windows_in_batch(model: Lowered) -> None:
    """Windows in the batch's place, biases and masks as one constant: attention of one picture, no tensor above rank
    4."""
    for attention in _attentions(model):
        attention.set_in_batch()


def flat_patches(model: Lowered) -> None:
    """Patches of one picture cut with no tensor above rank 5."""
    model.patch_embed = FlatPatchEmbed(model.patch_embed)


def one_constant(model: Lowered) -> None:
    """Position bias and mask stored as one constant [nW * heads, L, L]; else engines compute it on loading."""
    for attention in _attentions(model):
        attention.bake()


def window_order(model: Lowered) -> None:
    """Tokens stay in the order of windows: no roll, partition or reverse, a gather where the order changes."""
    first = model.layers[0].blocks[0]
    present = windows(first.resolution, first.window, 0)
    model.patch_embed = OrderedPatchEmbed(model.patch_embed, first.window, present)
    if model.absolute_pos_embed is not None:
        model.absolute_pos_embed = nn.Parameter(model.absolute_pos_embed[:, present])
    following = [*(layer.blocks[0] for layer in list(model.layers)[1:]), None]
    for layer, then in zip(model.layers, following, strict=True):
        for index, block in enumerate(layer.blocks):
            layer.blocks[index] = OrderedBlock(block, present)
            present = layer.blocks[index].order
        if then is not None:
            merged = get_token_order(then)
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
FOR_NPU: dict[str, Rewrite] = {"windows-in-batch": windows_in_batch, "flat-patches": flat_patches}  # of one picture


def _attentions(model: Lowered) -> list[QuantizedAttention]:
    found = [block.attn for layer in model.layers for block in layer.blocks]
    return [attention for attention in found if isinstance(attention, QuantizedAttention)]


def restored(model: Swin, rewrites: Collection[str]) -> dict[str, Restore | None]:
    """Module -> the function that undoes `rewrites` in its tensor; None if nothing can."""
    found: dict[str, Restore | None] = {}
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, WindowBlock)}
    if "fusible-attention" in rewrites:
        for name, block in blocks.items():
            found |= _attention(f"{name}.attn", block, "scale-in-weights" in rewrites)
    if "window-order" in rewrites:
        found |= _orders(model, blocks)
    return found


def _attention(at: str, block: WindowBlock, in_weights: bool) -> dict[str, Restore | None]:
    """The nodes of attention: q carries the scale (V1) or the learned scale (V2), unlike in the trained model."""
    found: dict[str, Restore | None] = {f"{at}.matmul_k_input_quantizer": lambda x: x.transpose(-2, -1)}
    if isinstance(block, SwinV2Block):
        return found | {f"{at}.{name}_input_quantizer": None for name in ("mha_q", "mha_k", "softmax", "matmul_k")}
    factor = 1.0 / float(block.attn.scale)  # type: ignore[arg-type]  # V1's attention has one
    nodes: dict[str, Restore | None] = {
        f"{at}.{name}_input_quantizer": partial(torch.mul, factor) for name in ("matmul_q", "softmax")
    }
    folded = in_weights and not block.attn.qkv._aftergemm_quantizer.setting.enabled  # type: ignore[union-attr]

    def unscaled(x: Tensor) -> Tensor:
        factors = torch.ones(3, x.shape[-1] // 3)
        factors[0] = factor
        return x * factors.flatten()

    return found | nodes | ({f"{at}.qkv": unscaled} if folded else {})


def _orders(model: Swin, blocks: Mapping[str, WindowBlock]) -> dict[str, Restore | None]:
    """The modules whose tokens are in the order of windows; not attention, whose tokens always are."""
    stages: list[Any] = list(model.layers)
    first = stages[0].blocks[0]
    found = _everywhere("patch_embed", model.patch_embed, windows(first.resolution, first.window, 0))
    for name, block in blocks.items():
        found |= _everywhere(name, block, get_token_order(block))
    for number, stage in enumerate(stages[:-1]):
        downsample, order = f"layers.{number}.downsample", get_token_order(stages[number + 1].blocks[0])
        found |= _everywhere(downsample, stage.downsample, order)
        found[f"layers.{number}"] = found[downsample]
    last = partial(_in_rows, torch.argsort(get_token_order(stages[-1].blocks[-1])))
    return found | {f"layers.{len(stages) - 1}": last, "norm": last}


def _everywhere(name: str, part: nn.Module, order: Tensor) -> dict[str, Restore | None]:
    places = partial(_in_rows, torch.argsort(order))
    inner = (below for below, _ in part.named_modules() if below and below.split(".")[0] != "attn")
    return {name: places, **{f"{name}.{below}": places for below in inner}}


def _in_rows(places: Tensor, x: Tensor) -> Tensor:
    """Tokens row by row, [B, T, C]; `x` may be of any shape with these elements in order."""
    return x.reshape(-1, len(places), x.shape[-1])[:, places]


REWRITER = Rewriter(
    REWRITES | FOR_NPU,
    SwinNetwork,
    builds_on="fusible-attention",
    constants=frozenset({"one-constant"}),
    unfused=frozenset({"windows-apart"}),
    for_npu=frozenset(FOR_NPU),
    for_half=frozenset({"fusible-attention", "window-order"}),
    plugins={
        "attention_branch": ATTENTION_BRANCH,
        "attention": ATTENTION,
        "mlp": MLP,
        "patch_merging": PATCH_MERGING,
        "patch_embedding": PATCH_EMBEDDING,
    },
    halve=halve,
    stem="patch_embed.proj",
    restore=restored,
)
