"""Parts of a block as one operator each, for engines with a plugin for it: window attention, alone or with the rest of
its branch, also on maps of any height and width; an MLP's branch; a patch merging; a patch embedding.

Their int8 linears have five constants each; a patch embedding is in floats.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.network import OperatorRewrite
from swin_quant.backends.onnx.operators import dequantize, quantize
from swin_quant.backends.onnx.swin.attention import CosineAttention, QuantizedAttention, norm
from swin_quant.backends.onnx.swin.blocks import OrderedBlock, OrderedMerging, OrderedPatchEmbed, Reorder
from swin_quant.models.maps import Cut, mask_between
from swin_quant.operators.plugins import FAST_DEPTH, FAST_TOKENS, plugged

_MLP_WIDTH, _MLP_HIDDEN = 32, 64  # what divides its widths (plugins/openvino/mlp_fast.hpp)
_EMBEDDING_WIDTH = 32  # what divides its channels (plugins/openvino/patch_embedding.hpp)
_MERGING_WIDTH = 32  # what divides the channels of its tokens (plugins/openvino/patch_merging.hpp)
_ROUNDED = tuple(f"matmul_{tensor}_input_quantizer" for tensor in "qkva")
_ROUNDED_V2 = tuple(f"mha_{tensor}_input_quantizer" for tensor in "qk") + _ROUNDED[2:]
attention, attention_branch, map_branch = map(plugged, ("attention", "attention_branch", "map_branch"))
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


class OperatorAttention(nn.Module):
    """`QuantizedAttention` as one operator, for q, k, v and an input of `proj` in int8; the softmax may be int8.

    softmax(q k^T + constant) v in each window, of int8 levels: q, k and v side by side [B, T, 3C], tokens window by
    window, and the constant float32 [nW * heads, L, L], that of i modulo nW in window i. It rounds as
    `QuantizedAttention` does. V2 normalises q and k before the operator, in the linear's output.
    """

    operator = "attention"

    def __init__(self, attn: QuantizedAttention) -> None:
        super().__init__()
        self.heads = attn.heads
        self.qkv: Linear = attn.qkv
        self.proj: Linear = attn.proj
        scales = [node.scale for node in _nodes(attn) if isinstance(node, Pair)]
        self.scales = [float(scale) for scale in scales]
        self.proj._input_quantizer = nn.Identity()
        for name in ("table", "index", "mask"):
            self.register_buffer(name, getattr(attn, name))
        q_scale = attn.head_scale[: self.heads].view(-1, 1) if isinstance(attn, CosineAttention) else None
        ones = torch.ones(self.heads, 1)
        self.gain: Tensor | None = None if q_scale is None else nn.Buffer(torch.cat([q_scale, ones, ones]))
        self.of_values: Tensor = nn.Buffer(torch.arange(3 * self.heads)[:, None] >= 2 * self.heads)
        channels = attn.proj._weight_quantizer.values.shape[0]
        self.scale: Tensor = nn.Buffer(torch.cat([scale.expand(channels) for scale in scales[:3]]))
        self.result: Tensor = nn.Buffer(scales[-1])

    apart = False
    addend: Any = QuantizedAttention.addend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: float32 [B, nW * L, C]. `mask`: the trained block passes it; the layer holds its own."""
        qkv = self.qkv(x)
        if self.gain is not None:  # q and k of each head get the length `gain` [3 heads, 1]; v stays
            heads = qkv.unflatten(-1, (3 * self.heads, -1))
            qkv = (heads * torch.where(self.of_values, 1.0, self.gain / norm(heads))).flatten(2)
        levels = quantize(qkv, self.scale)
        return self.proj(dequantize(attention(levels, self.addend(), self.heads, self.scales), self.result))


def is_fast_branch(block: Any, operator: str = "attention_branch") -> bool:
    """Whether the compiled operator is fast for the attention of a block: its channels a head and tokens a window."""
    channels = block.attn.proj._weight_quantizer.values.shape[0]
    return channels == FAST_DEPTH * block.attn.heads and block.attn.length <= FAST_TOKENS[operator]


def _nodes(attn: QuantizedAttention) -> list[Any]:
    """The nodes of q, k, v, the softmax and the result; all but the softmax's are pairs in what an operator takes."""
    names = _ROUNDED_V2 if isinstance(attn, CosineAttention) else _ROUNDED
    return [*(getattr(attn, name) for name in names), attn.proj._input_quantizer]


def _find_attention_fault(attn: QuantizedAttention) -> str | None:
    """The reason why the operator cannot compute `attn`; None if it can."""
    *qkv, softmax, result = _nodes(attn)
    pairs = [*qkv, result, *([softmax] if isinstance(softmax, Pair) else [])]
    if any(not isinstance(x, Pair) or x.zero_point is not None or x.offset or x.format != "int8" for x in pairs):
        return "has a float node or a zero point: choose ‹policy› qdq or cuda"
    others = [attn.softmax_input_quantizer, attn.qkv._aftergemm_quantizer]
    others += [getattr(attn, name) for name in _ROUNDED[:2]] if isinstance(attn, CosineAttention) else []
    if any(isinstance(x, Pair) for x in others):
        return "also rounds its logits or the result of qkv: choose ‹policy› qdq or cuda"
    if getattr(attn, "scale", None) is not None or (attn.index is None and attn.table.dim() > 3):
        return "has its scale outside of its weights, or windows apart: export it without ‹rewrites› of your own"
    return None


class WindowConstants(NormAndLinears):
    """The norm, the linears and the attention of a block's first branch as constants.

    Weight and bias of the norm [C]; scale and zero point of the levels that qkv takes, its W int8 [C, 3C], the scales
    of W [3C] and the bias [3C]; the same for proj, W int8 [C, C]; position biases [heads, P] and which of them two
    tokens have, int32 [L, L]; for V2 the length [heads] to which q is normalised, when k has 1. `scales`: of q, k, v,
    and of the softmax if it is rounded to int8.
    """

    def __init__(self, block: OrderedBlock) -> None:
        attn: Any = block.attn
        super().__init__(block.norm1, block.norm_last, qkv=attn.qkv, proj=attn.proj)
        self.heads = attn.heads
        self.scales = [float(node.scale) for node in _nodes(attn)[:-1] if isinstance(node, Pair)]
        self.table: Tensor = nn.Buffer(attn.table)
        self.index: Tensor = nn.Buffer(attn.index)
        q_scale = attn.head_scale[: self.heads].flatten() if isinstance(attn, CosineAttention) else None
        self.lengths: Tensor | None = None if q_scale is None else nn.Buffer(q_scale)

    def constants(self, *own: Tensor | None) -> list[Tensor]:
        """All of them, with the operator's `own` before the lengths of V2's q."""
        return super().constants(self.table, self.index, *own, self.lengths)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"heads": self.heads, "scales": self.scales} | super().attributes


class OperatorAttentionBranch(WindowConstants):
    """The order of tokens, norm, attention and addition of a block as one operator: float32 [B, T, C] -> [B, T, C].

    Its own constants: the places int32 [T] in x of the tokens, window by window, before all others; the region of each
    token, uint8 [nW, L], for windows in rounds of nW: tokens of two regions do not see each other.
    """

    operator = "attention_branch"

    def __init__(self, block: OrderedBlock) -> None:
        super().__init__(block)
        attn: Any = block.attn
        order = block.to_windows.places if isinstance(block.to_windows, Reorder) else torch.arange(len(block.order))
        block.to_windows = nn.Identity()  # the operator brings the tokens into this order
        self.places: Tensor = nn.Buffer(order.int())
        self.regions: Tensor = nn.Buffer(find_regions(attn.mask, attn.length))

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream in the order of the block before."""
        return attention_branch(x, self.places, *self.constants(self.regions), **self.attributes)


def find_regions(mask: Tensor | None, length: int) -> Tensor:
    """Numbers uint8 [nW, L] that are equal where a mask [nW, 1, L, L] is 0: of windows without mask all are."""
    if mask is None:
        return torch.zeros(1, length, dtype=torch.uint8)
    first = (mask[:, 0] == 0).int().argmax(-1)  # the first token that each one sees
    return torch.stack([row.unique(return_inverse=True)[1] for row in first]).to(torch.uint8)


def find_branch_fault(block: Any) -> str | None:
    """The reason why the operator cannot compute the branch of a block; None if it can."""
    around = (block.layernorm_input1_quantizer, block.add1_local_input_quantizer, block.add1_residual_input_quantizer)
    attn: QuantizedAttention = block.attn
    parts = (_find_attention_fault(attn), find_fault(attn.qkv), find_fault(attn.proj))
    if fault := fault_around(around) or next(filter(None, parts), None):
        return fault
    if attn.index is None:
        return "has its position bias and mask in one constant: export it without ‹rewrites› of your own"
    if attn.mask is None or torch.equal(mask_between(find_regions(attn.mask, attn.length))[:, None], attn.mask.float()):
        return None
    return "has a mask that is not one of regions"


class OperatorMapBranch(WindowConstants):
    """Windows, norm, attention and addition of a block as one operator: float32 [B, H, W, C] -> [B, H, W, C].

    Tokens that pad the map are zeros behind the norm.
    """

    operator = "map_branch"

    def __init__(self, block: OrderedBlock) -> None:
        super().__init__(block)
        attn: Any = block.attn
        self.cut: Cut = attn.cut

    def forward(self, x: Tensor) -> Tensor:
        """x: the residual stream."""
        cut: dict[str, Any] = {"window": self.cut.window, "shift": self.cut.shift, "pad_first": self.cut.pad_first}
        return map_branch(x, *self.constants(), **self.attributes, **cut)


def _find_map_fault(block: Any) -> str | None:
    if block.attn.cut.rests and any(block.attn.cut.shift):
        return "shifts by the size of its map (MODEL.FEATURES.WINDOWS mmpretrain)"
    return find_branch_fault(block)


ATTENTION = OperatorRewrite(
    "attn",
    lambda block: _find_attention_fault(block.attn),
    lambda block: is_fast_branch(block, "attention"),
    lambda block: OperatorAttention(block.attn),
    kind=QuantizedAttention,
)
_CALLS = "attended", lambda self, x: self.attn(x)
ATTENTION_BRANCH = OperatorRewrite(
    "attn", find_branch_fault, is_fast_branch, OperatorAttentionBranch, holder=OrderedBlock, calls=_CALLS
)
MAP_BRANCH = OperatorRewrite("attn", _find_map_fault, is_fast_branch, OperatorMapBranch, OrderedBlock, calls=_CALLS)
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
