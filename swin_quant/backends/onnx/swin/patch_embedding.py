"""Patch embedding, in floats, as one operator that gives tokens in the order of windows, for engines with a plugin."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, layer_norm, linear

from swin_quant.backends.onnx.network import OperatorRewrite
from swin_quant.backends.onnx.swin.blocks import OrderedPatchEmbed
from swin_quant.backends.onnx.swin.int8_operators import plugged
from swin_quant.models.maps import patches

_WIDTH = 32  # what divides its channels (plugins/openvino/patch_embedding.hpp)


@plugged
def patch_embedding(x: Tensor, *constants: Tensor, epsilon: float) -> Tensor:
    """The operator in torch: a convolution of patches that do not overlap, and a norm.

    x: float32 [B, C, H, W]; the result: float32 [B, T, E]. constants: weight [E, C, p, p] and bias [E] of the
    convolution; weight and bias of the norm [E]; the place int32 [T] of each token's patch, row by row. Without places
    the result is a map [B, ceil(H / p), ceil(W / p), E]: zeros lie beyond the edges of the pictures.
    """
    weight, bias, gain, offset, *places = constants
    if places:
        y = conv2d(x, weight, bias, stride=weight.shape[-1]).flatten(2).transpose(1, 2)[:, places[0]]
    else:
        y = linear(patches(x, weight.shape[-1]), weight.flatten(1), bias)
    return layer_norm(y, gain.shape, gain, offset, epsilon)


class OperatorEmbedding(nn.Module):
    """`OrderedPatchEmbed`, which gives tokens or a map, as one operator."""

    operator = "patch_embedding"

    def __init__(self, embed: OrderedPatchEmbed) -> None:
        super().__init__()
        self.norm: Any = embed.norm
        weight = embed.proj._weight_quantizer().detach()  # [C p p, E]
        bias = torch.zeros(weight.shape[1]) if embed.proj.bias is None else embed.proj.bias
        self.places: Tensor | None
        self.register_buffer("places", None if embed.order is None else embed.order.int())
        self.weight: Tensor = nn.Buffer(weight.t().reshape(weight.shape[1], -1, embed.patch, embed.patch).contiguous())
        self.bias: Tensor = nn.Buffer(bias)

    def forward(self, images: Tensor) -> Tensor:
        constants = [self.weight, self.bias, self.norm.weight, self.norm.bias]
        constants += [] if self.places is None else [self.places]
        return patch_embedding(images, *constants, epsilon=self.norm.eps)


def _find_fault(model: Any) -> str | None:
    if not isinstance(model.patch_embed, OrderedPatchEmbed):
        return "has tokens row by row: leave the rewrite window-order in"
    return "has no norm: leave it out" if isinstance(model.patch_embed.norm, nn.Identity) else None


def _is_fast(model: Any) -> bool:
    """Where it is chosen by its speed, it opens the stream of other operators: it was measured beside them."""
    has_others = any(getattr(module, "operator", None) == "mlp" for module in model.modules())
    return has_others and len(model.patch_embed.norm.weight) % _WIDTH == 0


def _call(model: Any) -> None:
    model.patch_embed = OperatorEmbedding(model.patch_embed)


PATCH_EMBEDDING = OperatorRewrite("patch_embed", _find_fault, _is_fast, _call)
