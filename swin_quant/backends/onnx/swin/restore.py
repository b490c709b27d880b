"""Undoes the rewrites of Swin in a file's tensors: the order of tokens, and the place of attention's scale."""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.rewriting import Restore
from swin_quant.backends.onnx.swin import tokens
from swin_quant.models.layers import Swin, WindowBlock
from swin_quant.models.swin_v2 import SwinV2Block


def restored(model: Swin, rewrites: Collection[str]) -> dict[str, Restore | None]:
    """Module -> the function that undoes `rewrites` in its tensor; None if nothing can."""
    found: dict[str, Restore | None] = {}
    if "fusible-attention" in rewrites:
        for name, block in _blocks(model):
            found |= _attention(f"{name}.attn", block, "scale-in-weights" in rewrites)
    if "window-order" in rewrites:
        found |= _orders(model)
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
    return found | nodes | ({f"{at}.qkv": partial(_unscaled, factor)} if folded else {})


def _unscaled(factor: float, x: Tensor) -> Tensor:
    """x [..., 3C] with its q multiplied by `factor`."""
    factors = torch.ones(3, x.shape[-1] // 3)
    factors[0] = factor
    return x * factors.flatten()


def _orders(model: Swin) -> dict[str, Restore | None]:
    """The modules whose tokens are in the order of windows; not attention, whose tokens always are."""
    found: dict[str, Restore | None] = {}
    blocks = dict(_blocks(model))
    first = next(iter(blocks.values()))
    order = tokens.windows(first.resolution, first.window, 0)
    found |= _everywhere("patch_embed", model.patch_embed, order)
    stages = [list(stage.blocks) for stage in model.layers]
    for name, block in blocks.items():
        order = tokens.windows(block.resolution, block.window, block.shift)
        found |= _everywhere(name, block, order)
    for number, stage in enumerate(model.layers):
        if number + 1 < len(stages):
            after = stages[number + 1][0]
            order = tokens.windows(after.resolution, after.window, after.shift)
            found |= _everywhere(f"layers.{number}.downsample", stage.get_submodule("downsample"), order)
        else:
            last = stages[number][-1]
            order = tokens.windows(last.resolution, last.window, last.shift)
        found[f"layers.{number}"] = partial(_in_rows, torch.argsort(order))
    return found | {"norm": partial(_in_rows, torch.argsort(order))}


def _everywhere(name: str, part: nn.Module, order: Tensor) -> dict[str, Restore | None]:
    places = partial(_in_rows, torch.argsort(order))
    inner = (below for below, _ in part.named_modules() if below and below.split(".")[0] != "attn")
    return {name: places, **{f"{name}.{below}": places for below in inner}}


def _in_rows(places: Tensor, x: Tensor) -> Tensor:
    """Tokens row by row, [B, T, C]; `x` may be of any shape with these elements in order."""
    return x.reshape(-1, len(places), x.shape[-1])[:, places]


def _blocks(model: Swin) -> list[tuple[str, WindowBlock]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, WindowBlock)]
