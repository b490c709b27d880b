"""Swin V1 and V2 as exported: a table of named rewrites, the same function with fewer or cheaper operators.

Each takes the lowered model (`onnx.network`) and changes it in place; the order of the table is that in which they
apply. None changes a number beyond the rounding of float32, and none changes an int8 value of a weight. `restored`
undoes them in a file's tensors: the order of tokens, and the place of attention's scale.

`halve` chooses the parts of a rewritten network that become float16. Float16: weights, products, GELU, attention and
the residual stream. Float32: LayerNorm, always (its squares overflow; TensorRT's own advice), V2's normalisation of q
and k, and whatever calibration saw beyond the largest float16. The residual stream is float16 as in
FasterTransformer's kernels and TensorRT's baselines (docs/reference, section 3.8): float32 would double the traffic of
every addition and norm, for a sum whose terms were float16. If one node of it was seen beyond float16, all of it is
float32: the value that overflows is carried on to the end.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear, Pair, StoredWeight, fits_half
from swin_quant.backends.onnx.network import Restore, Rewriter
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention
from swin_quant.backends.onnx.swin.blocks import (
    FlatPatchEmbed,
    OrderedBlock,
    OrderedMerging,
    OrderedPatchEmbed,
    SwinNetwork,
    get_token_order,
    windows,
)
from swin_quant.backends.onnx.swin.int8_operators import ATTENTION, ATTENTION_BRANCH, PLUGINS
from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.models.layers import Swin, WindowBlock
from swin_quant.models.swin_v2 import SwinV2Block

_RESULTS = {  # a block's linear -> other nodes that see its result
    "attn.qkv": ("attn.matmul_q_input_quantizer", "attn.matmul_k_input_quantizer", "attn.matmul_v_input_quantizer"),
    "attn.proj": ("add1_local_input_quantizer",),
    "mlp.fc1": ("mlp.fc2._input_quantizer",),
    "mlp.fc2": ("add2_local_input_quantizer",),
}
_NORM_INPUTS = {"attn.proj": "layernorm_input1_quantizer", "mlp.fc2": "layernorm_input2_quantizer"}
_STREAM = ("add1_residual_input_quantizer", "add2_residual_input_quantizer")


def halve(model: Swin, beyond_half: Iterable[str]) -> None:
    """Make `model`, with all rewrites applied, float16, except LayerNorms and layers around nodes in `beyond_half`."""
    wide, unfit = set(beyond_half), []
    # The residual stream, which V1's norms read, too; V2's norms read the branches
    on_stream = {
        f"{name}.{node}"
        for name, block in model.named_modules()
        if isinstance(block, OrderedBlock)
        for node in (_STREAM if block.norm_last else (*_STREAM, *_NORM_INPUTS.values()))
    }
    stream = torch.float32 if wide & on_stream else torch.float16
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module._weight_quantizer.raise_scales()
            fits, weight = _fit(module), module._weight_quantizer
            module.dtype = torch.float32 if wide & _linear_nodes(model, name) or not fits else torch.float16
            module.bias = None if module.bias is None else module.bias.to(module.dtype)
            if weight.scale is None:
                weight.values = weight.values.to(module.dtype)
            else:
                weight.scale = weight.scale.to(module.dtype)
        elif isinstance(module, QuantizedAttention):
            fits = _fit(*(node for node in module.children() if isinstance(node, Pair)))
            seen_beyond = {node for node in wide if node.rpartition(".")[0] == name}
            module.dtype = torch.float32 if seen_beyond or not fits else torch.float16
            module.table = module.table.to(module.dtype)
        elif isinstance(module, OrderedPatchEmbed):
            module.stream, fits = stream, True
        else:
            continue
        unfit += [] if fits else [name]
    if unfit:
        log.warning(
            "%d layers stay float32, because float16 cannot hold their scales: %s", len(unfit), listed(unfit, 3)
        )
    if model.absolute_pos_embed is not None:
        model.absolute_pos_embed.data = model.absolute_pos_embed.data.to(stream)


def _linear_nodes(model: Swin, name: str) -> set[str]:
    """The nodes on a linear's input and output."""
    found = {f"{name}._input_quantizer", f"{name}._aftergemm_quantizer"}
    block, _, layer = name.rpartition(".")
    block, _, part = block.rpartition(".")
    if nodes := _RESULTS.get(f"{part}.{layer}"):
        found |= {f"{block}.{node}" for node in nodes}
        if (norm := _NORM_INPUTS.get(f"{part}.{layer}")) and model.get_submodule(block).norm_last:
            found.add(f"{block}.{norm}")
    return found


def _fit(*modules: nn.Module) -> bool:
    """Whether float16 holds all scales in `modules`."""
    parts = (part for module in modules for part in module.modules() if isinstance(part, Pair | StoredWeight))
    return all(part.scale is None or fits_half(part.scale) for part in parts)


Lowered: TypeAlias = Any  # a Swin with some parts replaced by the parts of this folder


def fusible_attention(model: Lowered) -> None:
    """Attention of rank 4 with the scale in q and one additive constant; V2's position MLP is gone."""
    for layer in model.layers:
        for block in layer.blocks:
            kind = CosineAttention if isinstance(block, SwinV2Block) else QuantizedAttention
            block.attn = kind(block.attn, block.attn_mask)


def in_attentions(change: str) -> Callable[[Lowered], None]:
    """The rewrite that calls this method of each attention."""

    def rewrite(model: Lowered) -> None:
        for block in (block for layer in model.layers for block in layer.blocks):
            if isinstance(block.attn, QuantizedAttention):
                getattr(block.attn, change)()

    return rewrite


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


def flat_patches(model: Lowered) -> None:
    """Patches of one picture cut with no tensor above rank 5."""
    model.patch_embed = FlatPatchEmbed(model.patch_embed)


REWRITES: dict[str, Callable[[Lowered], None]] = {
    "fusible-attention": fusible_attention,
    # Fold the scale of V1's attention into q's rows of the qkv weight and bias, which saves an operator
    "scale-in-weights": in_attentions("fold_scale"),
    # Windows in a dimension of their own, not among the heads: fewer transpositions where attention is not fused
    "windows-apart": in_attentions("set_apart"),
    # Position bias and mask stored as one constant [nW * heads, L, L]; else engines compute it on loading
    "one-constant": in_attentions("bake"),
    "window-order": window_order,
}
# Of one picture: windows in the batch's place, biases and masks as one constant, no tensor of attention above rank 4
FOR_NPU = {"windows-in-batch": in_attentions("set_in_batch"), "flat-patches": flat_patches}


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
    plugins={"attention_branch": ATTENTION_BRANCH, "attention": ATTENTION} | PLUGINS,
    halve=halve,
    stem="patch_embed.proj",
    restore=restored,
)
