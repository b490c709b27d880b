"""Pack a model's tensors: quantized weights in the layout of the operands, scales folded into as few as possible.

Heads are padded with zeros to a width that the kernels take: rows of q, k and v, and columns of the projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.attention import bias_row
from swin_quant.backends.cuda.spec import REDUCTION, NetworkSpec
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.layers import Swin
from swin_quant.models.swin_v2 import LARGEST_LOGIT_SCALE
from swin_quant.quant.fake_quant import TINY_AMAX, grid, to_levels
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.quantizer import named_nodes


class Packing:
    """Arithmetic `cuda`: int8 or float8 operands, everything else float. `whole` fills `tensors` and `scalars`.

    `preprocess`: how pictures are normalised, for a spec that takes pixels.
    """

    def __init__(self, model: Swin, spec: NetworkSpec, preprocess: Preprocess | None = None) -> None:
        self.model, self.spec, self.preprocess, self.nodes = model, spec, preprocess, named_nodes(model)
        self.largest = grid(8, format=spec.format)[1]
        self.tensors: dict[str, Tensor] = {}
        self.scalars: dict[str, float] = {}

    def whole(self) -> None:
        """Pack every part of the network."""
        model: Any = self.model
        self.patch_embedding(model.patch_embed.proj)
        if self.spec.geometry.patch_norm:
            self.norm("patch_embed.norm", model.patch_embed.norm)
        if model.absolute_pos_embed is not None:
            self._float("absolute_pos_embed", model.absolute_pos_embed[0])
        for i, stage in enumerate(model.layers):
            for j, block in enumerate(stage.blocks):
                self.block(f"layers.{i}.blocks.{j}.", block, i)
            if stage.downsample is not None:
                self.linear(f"layers.{i}.{REDUCTION}", stage.downsample.reduction)
                self.norm(f"layers.{i}.downsample.norm", stage.downsample.norm)
        self.norm("norm", model.norm)
        if self.spec.exit_factors:
            self._float("norm.factors", model.norm.factors.weight)
        self._float("head.weight", model.head.weight)
        self._float("head.bias", model.head.bias)

    def patch_embedding(self, layer: Any) -> None:
        """Its weight and bias; for pixels with their normalisation folded in, except the division by 255.

        The mean is folded into the bias by the weights after they are rounded to half, so that the weights' rounding
        stays the only error, as without folding.
        """
        weight, bias = layer.weight.double(), layer.bias.double()
        if self.preprocess:
            mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in
                         (self.preprocess.mean, self.preprocess.std))  # fmt: skip
            weight = (weight / std).to(self.spec.half).double()
            bias = bias - (weight * mean).sum((1, 2, 3))
        self._half("patch_embed.proj.weight", weight.flatten(1))
        self._float("patch_embed.proj.bias", bias)

    def block(self, at: str, block: Any, stage: int) -> None:
        """One block; its names begin with `at`."""
        self.norm(f"{at}norm1", block.norm1)
        self.norm(f"{at}norm2", block.norm2)
        self.linear(f"{at}attn.qkv", block.attn.qkv, stage)
        self.attention(f"{at}attn.", block.attn, stage)
        self.linear(f"{at}attn.proj", block.attn.proj, stage)
        self.mlp(f"{at}mlp.", block.mlp)

    def linear(self, name: str, layer: QuantLinear, stage: int = 0) -> None:
        """Weight, scale of the sums, bias, and the factor on its input. `stage` sets the width of heads."""
        bias, scale = layer.effective_bias(), None
        weight = layer.weight.float()
        if name in self.spec.quantized:
            weight, scale = self.quantized(name, layer)
            if not name.endswith("attn.proj"):  # part of attention's context scale
                self.scalars[f"{name}.input_levels"] = self.levels(f"{name}._input_quantizer")
        if name.endswith("attn.qkv"):
            weight, bias = (
                self.padded(weight, stage),
                self.padded(torch.zeros(len(weight)) if bias is None else bias, stage),
            )
            scale = None if scale is None else self.padded(scale, stage)
        if name.endswith("attn.proj"):
            weight = self.padded(weight.T, stage).T
        self.tensors[f"{name}.weight"] = weight.to(self.spec.operand if name in self.spec.quantized else self.spec.half)
        if scale is not None:
            self._float(f"{name}.scale", scale)
        if bias is not None:
            self._float(f"{name}.bias", bias)

    def quantized(self, name: str, layer: QuantLinear) -> tuple[Tensor, Tensor]:
        """Levels [N, K] as in fake-quant, and the float64 [N] factors on sums of products."""
        node = layer._weight_quantizer
        levels, step = to_levels(layer.weight, node.range_for(layer.weight), *node.grid)
        steps = step.double().reshape(-1).expand(len(levels))
        return levels, steps * self.step(f"{name}._input_quantizer")

    def attention(self, at: str, attn: Any, stage: int) -> None:
        """Scales of the two products, position biases and, in V2, the lengths of q and k."""
        logits, context = self.attention_scales(at, attn, stage)
        self.scalars[f"{at}logits_scale"], self.scalars[f"{at}context_scale"] = logits, context
        bias = attn.relative_position_bias()
        self._half(f"{at}position_bias", F.pad(bias, (0, bias_row(bias.shape[-1]) - bias.shape[-1])))
        if self.spec.version == 2:
            lengths = torch.ones(3, attn.heads)
            lengths[0] = self.lengths_of_q(attn)
            self._float(
                f"{at}lengths", self.padded(lengths.flatten().repeat_interleave(self.spec.head_dim(stage)), stage)
            )

    def attention_scales(self, at: str, attn: Any, stage: int) -> tuple[float, float]:
        """The factors on sums of q and k, and on sums of probabilities and values."""
        q, k = (f"{at}{'mha' if self.spec.version == 2 else 'matmul'}_{x}_input_quantizer" for x in "qk")
        a, v, result = (f"{at}{x}_input_quantizer" for x in ("matmul_a", "matmul_v", "proj."))
        logits, context = self.own_scale(attn), 1.0
        if f"{at}q k" in self.spec.quantized:
            self.levels_of_qkv(at, [self.levels(q), self.levels(k), self.levels(v)], stage)
            logits, context = logits * self.step(q) * self.step(k), self.step(v)
        if f"{at}a v" in self.spec.quantized:
            self.scalars[f"{at}softmax_levels"] = self.levels(a)
            context *= self.step(a)
        return logits, context * (self.levels(result) if f"{at}proj" in self.spec.quantized else 1.0)

    def own_scale(self, attn: Any) -> float:
        """The model's own factor on logits; V2 has it in the length of q."""
        return attn.scale if self.spec.version == 1 else 1.0

    def lengths_of_q(self, attn: Any) -> Tensor:
        """V2's logit scale [heads], as the length of the vectors of q."""
        return attn.logit_scale.float().clamp(max=LARGEST_LOGIT_SCALE).exp().flatten()

    def levels_of_qkv(self, at: str, levels: Sequence[float], stage: int) -> None:
        """The factors on q, k and v before they are rounded."""
        by_channel = torch.tensor(levels, dtype=torch.float64).repeat_interleave(self.spec.channels(stage))
        self._float(f"{at}qkv.levels", self.padded(by_channel, stage))

    def mlp(self, at: str, mlp: Any) -> None:
        """fc1 and fc2."""
        self.linear(f"{at}fc1", mlp.fc1)
        self.linear(f"{at}fc2", mlp.fc2)

    def norm(self, name: str, norm: Any) -> None:
        """Weight and bias of a norm."""
        self._float(f"{name}.weight", norm.weight)
        self._float(f"{name}.bias", norm.bias)

    def padded(self, x: Tensor, stage: int) -> Tensor:
        """x [3 * C, ...] of q, k and v with zeros after the channels of each head."""
        heads = x.unflatten(0, (-1, self.spec.head_dim(stage)))
        short = self.spec.padded_head_dim(stage) - heads.shape[1]
        return torch.cat([heads, heads.new_zeros(len(heads), short, *heads.shape[2:])], dim=1).flatten(0, 1)

    def step(self, node: str) -> float:
        """The factor from a level to the real value; 0 for a range that makes everything zero, as in fake-quant."""
        amax = self.amax(node)
        return amax / self.largest if amax > TINY_AMAX else 0.0

    def levels(self, node: str) -> float:
        """The factor from a real value to its level; 0 for such a range."""
        amax = self.amax(node)
        return self.largest / amax if amax > TINY_AMAX else 0.0

    def amax(self, node: str) -> float:
        """The node's amax. SwinQuantError if it was never calibrated."""
        return self.nodes[node].range.abs().max().item()

    def _float(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.float()

    def _half(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.to(self.spec.half)
