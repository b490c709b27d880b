"""An MLP's branch, a patch merging and a patch embedding as one operator each, for engines with a plugin for it.

Their int8 linears have five constants each; a patch embedding is in floats.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.network import OperatorRewrite
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedMerging, OrderedPatchEmbed
from swin_quant.operators.plugins import plugged

_MLP_WIDTH, _MLP_HIDDEN = 32, 64  # what divides its widths (plugins/openvino/mlp_fast.hpp)
_EMBEDDING_WIDTH = 32  # what divides its channels (plugins/openvino/patch_embedding.hpp)
_MERGING_WIDTH = 32  # what divides the channels of its tokens (plugins/openvino/patch_merging.hpp)
mlp, patch_merging, patch_embedding = map(plugged, ("mlp", "patch_merging", "patch_embedding"))


class NormAndLinears(nn.Module):
    """A norm and int8 linears as the constants of an operator."""

    def __init__(self, norm: nn.Module, norm_last: bool, **linears: Any) -> None:
        """`linears`: the layers by their names in the trained module. Each is given all its constants."""
        super().__init__()
        self.norm: Any = norm
        self.norm_last, self.linears = norm_last, tuple(linears)
        for name, linear in linears.items():
            node, weight = linear._input_quantizer, linear._weight_quantizer
            kind = torch.int8 if node.zero_point is None else torch.uint8
            node.register_buffer("zero", torch.tensor(node.zero_point or 0, dtype=kind))
            weight.scale = weight.scale.expand(weight.values.shape[1]).contiguous()
            if linear.bias is None:
                linear.bias = torch.zeros_like(weight.scale)
            self.add_module(name, linear)

    def constants(self, *own: Tensor | None) -> list[Tensor]:
        """All of them, then the operator's `own`, if there."""
        found = [self.norm.weight, self.norm.bias]
        for name in self.linears:
            linear: Any = self.get_submodule(name)
            node, weight = linear._input_quantizer, linear._weight_quantizer
            found += [node.scale, node.zero, weight.values, weight.scale, linear.bias]
        return found + [one for one in own if one is not None]

    @property
    def attributes(self) -> dict[str, Any]:
        return {"norm_last": self.norm_last, "epsilon": self.norm.eps}


class OperatorMlp(NormAndLinears):
    """The norm, the MLP and the addition of a block as one operator: float32 [..., C] -> [..., C].

    x + fc2(f(fc1(norm(x)))), or x + norm(fc2(f(fc1(x)))) with `norm_last`; f: the `activation` of this name. Its
    constants: weight and bias of the norm [C]; scale and zero point of the levels that fc1 takes, its W int8 [C, H],
    the scales of W [H] and the bias [H]; the same for fc2, W int8 [H, C]. If fc1 gives [2 H], f of its first half is
    multiplied by the other one.
    """

    operator = "mlp"

    def __init__(self, norm: nn.Module, norm_last: bool, fc1: Linear, fc2: Linear, activation: str = "gelu") -> None:
        super().__init__(norm, norm_last, fc1=fc1, fc2=fc2)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        return mlp(x, *self.constants(), **self.attributes, activation=self.activation)


class OperatorMerging(NormAndLinears):
    """`OrderedMerging` as one operator: a norm and an int8 linear of four tokens, [B, T, C] -> [B, T / 4, E].

    Its constants: weight and bias of the norm [4 C], or [E] if it is last; scale and zero point of the levels that the
    linear takes, its W int8 [4 C, E], the scales of W [E] and the bias [E]; the places int32 [T] in x of the four
    tokens of each result. Without places x is a map [B, H, W, C], and the result [B, ceil(H / 2), ceil(W / 2), E]:
    zeros lie beyond its edges.
    """

    operator = "patch_merging"

    def __init__(self, merging: OrderedMerging) -> None:
        super().__init__(merging.norm, not merging.norm_first, reduction=merging.reduction)
        self.places: Tensor | None = None if merging.places is None else nn.Buffer(merging.places)

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream in the order of the last block."""
        return patch_merging(x, *self.constants(self.places), **self.attributes)


class OperatorEmbedding(nn.Module):
    """`OrderedPatchEmbed` as one operator: patches that do not overlap, and a norm, [B, C, H, W] -> [B, T, E].

    Its constants: weight [E, C, p, p] and bias [E] of the convolution; weight and bias of the norm [E]; the place int32
    [T] of each token's patch, row by row. Without places the result is a map [B, ceil(H / p), ceil(W / p), E]: zeros
    lie beyond the edges of the pictures.
    """

    operator = "patch_embedding"

    def __init__(self, embed: OrderedPatchEmbed) -> None:
        super().__init__()
        self.norm: Any = embed.norm
        weight = embed.proj._weight_quantizer().detach()  # [C p p, E]
        bias = torch.zeros(weight.shape[1]) if embed.proj.bias is None else embed.proj.bias
        self.places: Tensor | None = None if embed.order is None else nn.Buffer(embed.order.int())
        self.weight: Tensor = nn.Buffer(weight.t().reshape(weight.shape[1], -1, embed.patch, embed.patch).contiguous())
        self.bias: Tensor = nn.Buffer(bias)

    def forward(self, images: Tensor) -> Tensor:
        constants = [self.weight, self.bias, self.norm.weight, self.norm.bias]
        constants += [] if self.places is None else [self.places]
        return patch_embedding(images, *constants, epsilon=self.norm.eps)


def find_fault(linear: Linear) -> str | None:
    """The reason why a linear cannot have these constants; None if it can."""
    node, weight = linear._input_quantizer, linear._weight_quantizer
    if fault := fault_around([linear._aftergemm_quantizer]):
        return fault
    is_eight = isinstance(node, Pair) and node.format == "int8" and not node.offset
    if not is_eight or weight.scale is None or weight.values.dtype != torch.int8:
        return "has a float node: choose ‹policy› qdq or cuda"
    if weight.scale.dim() > 1:
        return "has weights in blocks: choose ‹policy› qdq or cuda"
    return None


def fault_around(nodes: Iterable[Any]) -> str | None:
    """The reason why an operator cannot compute what has these `nodes` beside its linears' inputs; None if it can."""
    rounds = any(isinstance(node, Pair) for node in nodes)
    return "rounds more than the inputs of its linears: choose ‹policy› qdq or cuda" if rounds else None


def _find_mlp_fault(block: Any) -> str | None:
    around = (block.layernorm_input2_quantizer, block.add2_local_input_quantizer, block.add2_residual_input_quantizer)
    return fault_around(around) or find_fault(block.mlp.fc1) or find_fault(block.mlp.fc2)


def is_fast_mlp(width: int, hidden: int) -> bool:
    """Whether the compiled operator is fast for an MLP of these widths."""
    return not (width % _MLP_WIDTH or hidden % _MLP_HIDDEN)


def _find_embedding_fault(model: Any) -> str | None:
    if not isinstance(model.patch_embed, OrderedPatchEmbed):
        return "has tokens row by row: leave the rewrite window-order in"
    return "has no norm: leave it out" if isinstance(model.patch_embed.norm, nn.Identity) else None


def _is_fast_embedding(model: Any) -> bool:
    """Where it is chosen by its speed, it opens the stream of other operators: it was measured beside them."""
    has_others = any(getattr(module, "operator", None) == "mlp" for module in model.modules())
    return has_others and len(model.patch_embed.norm.weight) % _EMBEDDING_WIDTH == 0


_MLP = OperatorRewrite(
    "mlp",
    _find_mlp_fault,
    lambda block: is_fast_mlp(*block.mlp.fc1._weight_quantizer.values.shape),
    lambda block: OperatorMlp(block.norm2, block.norm_last, block.mlp.fc1, block.mlp.fc2),
    holder=OrderedBlock,
    calls=("forward", lambda self, x: self.mlp(self.attended(x))),
)
_PATCH_MERGING = OperatorRewrite(
    "downsample",
    lambda stage: find_fault(stage.downsample.reduction),
    lambda stage: stage.downsample.reduction._weight_quantizer.values.shape[0] % (4 * _MERGING_WIDTH) == 0,
    lambda stage: OperatorMerging(stage.downsample),
    kind=OrderedMerging,
)
_PATCH_EMBEDDING = OperatorRewrite(
    "patch_embed", _find_embedding_fault, _is_fast_embedding, lambda model: OperatorEmbedding(model.patch_embed)
)
PLUGINS = {"mlp": _MLP, "patch_merging": _PATCH_MERGING, "patch_embedding": _PATCH_EMBEDDING}
