"""A network as the engine runs it: its spec with every tensor and scalar that the launches name, packed for the
kernels.

Quantized weights get the layout of the operands; scales are folded into as few as possible. Heads are padded with zeros
to a width that the kernels take: rows of q, k and v, and columns of the projection. For FasterTransformer's arithmetic,
biases and norms are rounded to float16, and so are weights before they are quantized; sums of products are rounded to
int8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.attention import bias_row
from swin_quant.backends.cuda.spec import REDUCTION, NetworkSpec
from swin_quant.backends.integer_arithmetic import gelu_table
from swin_quant.base.errors import SwinQuantError, listed
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
        weight, bias = model.patch_embed.proj.weight.double(), model.patch_embed.proj.bias.double()
        if self.preprocess:
            # Pixels: their normalisation is folded in, except the division by 255. The mean is folded into the bias by
            # the weights after they are rounded to half: their rounding stays the only error, as without folding.
            given = self.preprocess.mean, self.preprocess.std
            mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in given)
            weight = (weight / std).to(self.spec.half).double()
            bias = bias - (weight * mean).sum((1, 2, 3))
        self.tensors["patch_embed.proj.weight"] = weight.flatten(1).to(self.spec.half)
        self._float("patch_embed.proj.bias", bias)
        if self.spec.geometry.patch_norm:
            self.norm("patch_embed.norm", model.patch_embed.norm)
        if model.absolute_pos_embed is not None:
            self._float("absolute_pos_embed", model.absolute_pos_embed[0])
        for i, stage in enumerate(model.layers):
            for j, block in enumerate(stage.blocks):
                at = f"layers.{i}.blocks.{j}."
                self.norm(f"{at}norm1", block.norm1)
                self.norm(f"{at}norm2", block.norm2)
                self.linear(f"{at}attn.qkv", block.attn.qkv, i)
                self.attention(f"{at}attn.", block.attn, i)
                self.linear(f"{at}attn.proj", block.attn.proj, i)
                self.linear(f"{at}mlp.fc1", block.mlp.fc1)
                self.linear(f"{at}mlp.fc2", block.mlp.fc2)
            if stage.downsample is not None:
                self.linear(f"layers.{i}.{REDUCTION}", stage.downsample.reduction)
                self.norm(f"layers.{i}.downsample.norm", stage.downsample.norm)
        self.norm("norm", model.norm)
        if self.spec.exit_factors:
            self._float("norm.factors", model.norm.factors.weight)
        self._float("head.weight", model.head.weight)
        self._float("head.bias", model.head.bias)

    def linear(self, name: str, layer: QuantLinear, stage: int = 0) -> None:
        """Weight, scale of the sums, bias, and the factor on its input. `stage` sets the width of heads."""
        bias, scale = layer.effective_bias(), None
        weight = layer.weight.float()
        if name in self.spec.quantized:
            weight, scale = self.quantized(name, layer)
            if not name.endswith("attn.proj"):  # part of attention's context scale
                self.scalars[f"{name}.input_levels"] = self.levels(f"{name}._input_quantizer")
        elif self.spec.folds(name):
            scale = torch.ones(len(weight))
        if name.endswith("attn.qkv"):
            bias = self.padded(torch.zeros(len(weight)) if bias is None else bias, stage)
            weight, scale = self.padded(weight, stage), None if scale is None else self.padded(scale, stage)
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
        self.scalars[f"{at}logits_scale"], self.scalars[f"{at}context_scale"] = self.attention_scales(at, attn, stage)
        bias = attn.relative_position_bias()
        bias = F.pad(bias, (0, bias_row(bias.shape[-1]) - bias.shape[-1]))
        self.tensors[f"{at}position_bias"] = bias.to(self.spec.half)
        if self.spec.version == 2:  # q gets the length of its head's logit scale
            scale = attn.logit_scale.half() if self.spec.is_ft else attn.logit_scale.float()
            scale = scale.clamp(max=LARGEST_LOGIT_SCALE).float().exp()
            q_lengths = (scale.half() if self.spec.is_ft else scale).flatten().float().cpu()
            lengths = torch.cat([q_lengths, torch.ones(2 * attn.heads)])
            self._float(f"{at}lengths", self.padded(lengths.repeat_interleave(self.spec.head_dim(stage)), stage))

    def attention_scales(self, at: str, attn: Any, stage: int) -> tuple[float, float]:
        """The factors on sums of q and k, and on sums of probabilities and values."""
        q, k = (f"{at}{'mha' if self.spec.version == 2 else 'matmul'}_{x}_input_quantizer" for x in "qk")
        a, v, result = (f"{at}{x}_input_quantizer" for x in ("matmul_a", "matmul_v", "proj."))
        logits, context = attn.scale if self.spec.version == 1 else 1.0, 1.0  # V2 has its own in the length of q
        if f"{at}q k" in self.spec.quantized:
            self.set_qkv_levels(at, [self.levels(q), self.levels(k), self.levels(v)], stage)
            logits, context = logits * self.step(q) * self.step(k), self.step(v)
        if f"{at}a v" in self.spec.quantized:
            self.scalars[f"{at}softmax_levels"] = self.levels(a)
            context *= self.step(a)
        return logits, context * (self.levels(result) if f"{at}proj" in self.spec.quantized else 1.0)

    def set_qkv_levels(self, at: str, levels: Sequence[float], stage: int) -> None:
        """The factors on q, k and v before they are rounded."""
        by_channel = torch.tensor(levels, dtype=torch.float64).repeat_interleave(self.spec.channels(stage))
        self._float(f"{at}qkv.levels", self.padded(by_channel, stage))

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
        return amax / self.largest if (amax := self.amax(node)) > TINY_AMAX else 0.0

    def levels(self, node: str) -> float:
        """The factor from a real value to its level; 0 for such a range."""
        return self.largest / amax if (amax := self.amax(node)) > TINY_AMAX else 0.0

    def amax(self, node: str) -> float:
        """The node's amax. SwinQuantError if it was never calibrated."""
        return self.nodes[node].range.abs().max().item()

    def _float(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.float()


@dataclass(frozen=True)
class Network:
    """`tensors`, on the CPU, and `scalars`, by the names that the launches of `spec` use.

    `preprocess`: how a network that takes pixels normalises them.
    """

    spec: NetworkSpec
    tensors: dict[str, Tensor] = field(repr=False)
    scalars: dict[str, float] = field(repr=False)
    preprocess: Preprocess | None = None


@torch.no_grad()
def pack(model: Swin, spec: NetworkSpec, preprocess: Preprocess | None = None) -> Network:
    """The network of a calibrated model. `preprocess`, for a spec that takes pixels, is folded into the weights.

    SwinQuantError for a node without a range, and for values that overflow half precision.
    """
    packing = FtPacking(model, spec) if spec.is_ft else Packing(model, spec, preprocess)
    packing.whole()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in packing.tensors.items()}
    if beyond := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise SwinQuantError(f"{listed(beyond, 2)}: NaN, or beyond {spec.float_type}: the CUDA engine cannot run this")
    return Network(spec, tensors, packing.scalars, preprocess)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any type holds neither NaN nor Inf; torch's isfinite does not take float8."""
    return bool(tensor.float().isfinite().all() if tensor.is_floating_point() else True)


class FtPacking(Packing):
    """Arithmetic `ft-mode1` or `ft-mode2`: one range a node, and scales as FasterTransformer computes them, stored as
    float32."""

    def __init__(self, model: Swin, spec: NetworkSpec) -> None:
        super().__init__(model, spec)
        self.ranges = {name: self.amax(name) for name, node in self.nodes.items() if node.setting.enabled}

    def linear(self, name: str, layer: QuantLinear, stage: int = 0) -> None:
        super().linear(name, layer, stage)
        given, weight = (self.ranges[f"{name}.{node}_quantizer"] for node in ("_input", "_weight"))
        if not self._is_wide(name):
            levels = _stored(given * weight / (127 * self.ranges[f"{name}._aftergemm_quantizer"]))
        elif name.endswith(REDUCTION):
            levels = 1 / self.levels(f"{name}._input_quantizer") * (weight / 127)
        else:
            levels = given / 127
        self.scalars[f"{name}.product_levels"] = levels
        if name.endswith("mlp.fc1"):  # GELU's table has its scale and bias, and the levels of fc2's input
            fc2 = f"{name[:-1]}2._input_quantizer"
            step, levels = self.step(f"{name}._aftergemm_quantizer"), self.levels(fc2)
            self.tensors[f"{name}.gelu"] = gelu_table(step, layer.bias.half(), levels)
            del self.tensors[f"{name}.scale"], self.tensors[f"{name}.bias"]
        elif name.endswith("mlp.fc2"):
            del self.scalars[f"{name}.input_levels"]

    def quantized(self, name: str, layer: QuantLinear) -> tuple[Tensor, Tensor]:
        amax = self.ranges[f"{name}._weight_quantizer"]
        whole = (layer.weight.half().double() * 127 / amax).float().round().clamp(-128, 127)
        # The factor from rounded sums to real values, in the precision of the kernel that reads them.
        if self._is_wide(name):
            step = 1.0 if name.endswith(REDUCTION) else amax / 127
        else:
            step = self.step(f"{name}._aftergemm_quantizer")
            if name.endswith(("attn.proj", "mlp.fc2")) and self.spec.version == 2:
                step = float(np.float16(step))
        return whole, torch.full((len(whole),), step)

    def levels(self, node: str) -> float:
        return _stored(127 / self.ranges[node])

    def step(self, node: str) -> float:
        return _stored(self.ranges[node] / 127)

    def attention_scales(self, at: str, attn: Any, stage: int) -> tuple[float, float]:
        q, k, v, a, result = (
            f"{at}{x}_input_quantizer" for x in ("matmul_q", "matmul_k", "matmul_v", "matmul_a", "proj.")
        )
        if self.spec.version == 2:
            before = torch.tensor([[factor(node) for node in (q, k, v)] for factor in (self.levels, self.step)])
            by_channel = before.repeat_interleave(self.spec.channels(stage), 1)
            self._float(f"{at}qkv.before", self.padded(by_channel.T, stage).T)
            q, k = (f"{at}mha_{x}_input_quantizer" for x in "qk")
        self.set_qkv_levels(at, [self.levels(node) for node in (q, k, v)], stage)
        self.scalars[f"{at}softmax_levels"] = self.levels(a)
        # The float32 products of two ranges are then divided in double
        q_k, a_v = (float(np.float32(self.ranges[x]) * np.float32(self.ranges[y])) for x, y in ((q, k), (a, v)))
        logits = _stored(q_k / (127 * 127)) * (attn.scale if self.spec.version == 1 else 1.0)
        return logits, _stored(a_v / (127 * self.ranges[result]))

    def _float(self, name: str, tensor: Tensor) -> None:
        """Round norms and biases to float16; the head, outside FasterTransformer's op, stays float32."""
        halved = name.endswith(("bias", "norm1.weight", "norm2.weight", "norm.weight")) and not name.startswith("head.")
        super()._float(name, tensor.half() if halved else tensor)

    def _is_wide(self, name: str) -> bool:
        """Whether a layer's int32 sums are not rounded to int8: in mode 2 those of fc2 and of the reduction."""
        return self.spec.arithmetic == "ft-mode2" and name.endswith((".fc2", REDUCTION))


def _stored(value: float) -> float:
    return float(np.float32(value))
