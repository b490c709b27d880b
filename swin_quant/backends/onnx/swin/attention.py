"""Window attention in the one shape that engines fuse: softmax(q k^T + constant) v, of rank 4, the scale in q.

Facts: TensorRT's fused attention wants q [B, heads, L, D], the scale before the first product and an additive mask;
OpenVINO's wants rank 4 too, and a mask that does not depend on the batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.layers import Linear, Pair
from swin_quant.backends.onnx.operators import gather
from swin_quant.models.swin_v2 import LARGEST_LOGIT_SCALE, SMALLEST_NORM


class QuantizedAttention(nn.Module):
    """Attention of V1. The constant is the position bias plus, for shifted windows, their mask.

    The mask differs from window to window. Shifted windows therefore count as heads, [B, nW * heads, L, D]: rank 4,
    which engines fuse, and a constant that needs no batch. For engines that fuse no attention they are `apart`, [B, nW,
    heads, L, D]: all transpositions have rank 4 and leave the last dimension in place, which is fast. The view between
    them and the product keeps ONNX Runtime's optimizer from merging the transposition of k with the one before it,
    which would be slow: it is merged into the product instead.

    x: [B * nW, L, C] or [B, nW * L, C], any float type; the result has x's shape. `mask`: [nW, L, L] of 0 and -100.
    """

    matmul_q_input_quantizer: nn.Module
    matmul_k_input_quantizer: nn.Module
    matmul_v_input_quantizer: nn.Module
    matmul_a_input_quantizer: nn.Module
    softmax_input_quantizer: nn.Module
    apart = False
    scale: float | None = None  # V2 has one for each head, of normalised vectors

    def __init__(self, attn: Any, mask: Tensor | None) -> None:
        super().__init__()
        self.heads, self.length = attn.heads, attn.relative_position_index.shape[0]
        self.windows = 1 if mask is None else len(mask)
        self.qkv: Linear = attn.qkv
        self.proj: Linear = attn.proj
        for name, child in attn.named_children():
            if name.endswith("_quantizer"):
                self.add_module(name, child)
        bias, index = attn.relative_position_bias().detach().flatten(1), attn.relative_position_index.flatten()
        table = torch.zeros(self.heads, int(index.max()) + 1)
        table[:, index] = bias  # as small in the file as in a checkpoint, and equal for either version
        self.table: Tensor = nn.Buffer(table)
        self.index: Tensor | None = nn.Buffer(index.view(self.length, self.length).int())
        self.mask: Tensor | None = None if mask is None else nn.Buffer(mask[:, None].to(torch.int8))
        self.dtype = torch.float32
        self.prepare(attn)

    def prepare(self, attn: Any) -> None:
        """Move the scale from the logits into q, and scale the ranges of both nodes."""
        self.scale = attn.scale
        for node in (self.matmul_q_input_quantizer, self.softmax_input_quantizer):
            if isinstance(node, Pair):
                node.scale = node.scale * attn.scale

    def fold_scale(self) -> None:
        """Multiply the scale into the weights of q, unless their int8 product shares its range with k and v."""
        if self.scale is not None and not isinstance(self.qkv._aftergemm_quantizer, Pair):
            factors = torch.ones(3, self.proj._weight_quantizer.values.shape[0])
            factors[0] = self.scale
            self.qkv.scale_outputs(factors.flatten())
            self.scale = None

    def bake(self) -> None:
        """Store the constant in place of the table and mask that it is computed from."""
        self.table, self.index, self.mask = self.addend().contiguous(), None, None

    def addend(self) -> Tensor:
        """The constant [heads, L, L]; for shifted windows [nW * heads, L, L], apart [nW, heads, L, L]."""
        bias = self.table if self.index is None else gather(self.table, self.index)
        if self.mask is None:
            return bias
        whole = bias + self.mask.to(bias.dtype)  # [nW, 1, L, L]
        return whole if self.apart else whole.flatten(0, 1)

    def set_apart(self) -> None:
        """Take windows from among the heads into a dimension of their own."""
        self.apart = True

    def set_in_batch(self) -> None:
        """For one picture: windows in the batch's place, [nW, heads, L, D], no tensor above rank 4."""
        self.set_apart()
        self.bake()
        self.apart, self.windows = False, 1

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k^T, quantized, as the first product takes them."""
        q = q if self.scale is None else q * self.scale
        return self.matmul_q_input_quantizer(q), self.matmul_k_input_quantizer(k.transpose(-2, -1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: the trained block passes it; it is ignored, because the layer holds its own."""
        qkv = self.qkv(x).to(self.dtype)
        groups, depth = 3 * self.heads, qkv.shape[-1] // (3 * self.heads)
        if self.windows > 1 and not self.apart:
            qkv = qkv.view(-1, self.windows, self.length, 3, self.heads, depth).permute(0, 3, 1, 4, 2, 5)
            qkv = qkv.reshape(-1, groups * self.windows, self.length, depth)
        else:
            qkv = qkv.view(-1, self.length, groups, depth).transpose(1, 2)
            qkv = qkv.reshape(-1, self.windows, groups, self.length, depth) if self.apart else qkv
        q, k, v = qkv.chunk(3, 2 if self.apart else 1)
        q, k = self.scaled(q, k)
        logits = self.softmax_input_quantizer(q @ k) + self.addend()
        y = self.matmul_a_input_quantizer(logits.softmax(dim=-1)) @ self.matmul_v_input_quantizer(v)
        if self.apart:
            y = y.reshape(-1, self.heads, self.length, depth)
        elif self.windows > 1:
            y = y.view(-1, self.windows, self.heads, self.length, depth)
        return self.proj(y.transpose(-3, -2).reshape(-1, *x.shape[1:]))


class CosineAttention(QuantizedAttention):
    """Attention of V2: q and k are normalised, in float32, and q carries the learned scale of its head."""

    mha_q_input_quantizer: nn.Module
    mha_k_input_quantizer: nn.Module

    def prepare(self, attn: Any) -> None:
        scale = attn.logit_scale.detach().clamp(max=LARGEST_LOGIT_SCALE).exp()
        self.head_scale: Tensor = nn.Buffer(scale.repeat(self.windows, 1, 1))

    def set_apart(self) -> None:
        super().set_apart()
        self.head_scale = self.head_scale[: self.heads]

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.matmul_q_input_quantizer(q).float(), self.matmul_k_input_quantizer(k).float()
        q = q * (self.head_scale / norm(q))
        k = (k / norm(k)).to(self.dtype).transpose(-2, -1)
        return self.mha_q_input_quantizer(q.to(self.dtype)), self.mha_k_input_quantizer(k)


def norm(x: Tensor) -> Tensor:
    """The length of each vector along the last dimension, which is kept."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
