"""The weights of an INT8 export as the emulator computes with them, block by block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from swin_quant.backends.fastertransformer.arithmetic import gelu_table
from swin_quant.backends.fastertransformer.attention import AttentionWeights
from swin_quant.backends.fastertransformer.gelu_bias import as_read, shifted
from swin_quant.backends.fastertransformer.interface import is_default_scale
from swin_quant.backends.fastertransformer.scales import REDUCTION, Scales
from swin_quant.backends.fastertransformer.slots import head_dim
from swin_quant.backends.fastertransformer.stored import Stored


@dataclass(frozen=True)
class NetworkLayer:
    """A linear layer or convolution: kernel in float32, whole numbers if it is int8; bias float16 [n]."""

    kernel: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Norm:
    """float16 [C] each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Block:
    """One block; `gelu` is the table of fc1's results."""

    attn: AttentionWeights
    proj: NetworkLayer
    fc1: NetworkLayer
    fc2: NetworkLayer
    gelu: Tensor
    norm1: Norm
    norm2: Norm
    window: int
    shift: int
    scales: Scales


@dataclass(frozen=True)
class Merging:
    """Between two stages: kernel [2C, 4C], no bias; the scales are those of the stage's block 0."""

    reduction: Tensor
    norm: Norm
    scales: Scales


class Reader:
    """Parts of the network from the tensors of an export, on a device.

    `misread` False takes fc1's biases as they are meant, where the kernel of GELU would misread them.
    """

    def __init__(self, stored: Stored, fused: bool, device: torch.device, misread: bool = True) -> None:
        self.g, self.version, self.fused = stored.case.g, stored.case.form.version, fused
        self.shifted, self.misread = stored.case.form.fix_gelu_bias, misread
        self._tensors = {name: tensor.to(device) for name, tensor in stored.tensors.items()}

    def layer(self, name: str) -> NetworkLayer:
        return NetworkLayer(self._tensors[f"{name}.weight"].float(), self._tensors[f"{name}.bias"])

    def norm(self, name: str) -> Norm:
        return Norm(self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def block(self, stage: int, block: int) -> Block:
        at, scales = f"layers.{stage}.blocks.{block}.", self._scales(stage, block)
        fc1 = self.layer(f"{at}mlp.fc1")
        step, levels = scales.step("mlp.fc1._aftergemm_quantizer"), scales.levels("mlp.fc2._input_quantizer")
        shift = self.g.shift(stage, block)
        return Block(
            attn=self._attention(stage, at, shift > 0, scales),
            proj=self.layer(f"{at}attn.proj"),
            fc1=fc1,
            fc2=self.layer(f"{at}mlp.fc2"),
            gelu=gelu_table(step, self._read(fc1.bias), levels),
            norm1=self.norm(f"{at}norm1"),
            norm2=self.norm(f"{at}norm2"),
            window=self.g.window_in_use(stage),
            shift=shift,
            scales=scales,
        )

    def merging(self, stage: int) -> Merging:
        at = f"layers.{stage}."
        reduction = self._tensors[f"{at}{REDUCTION}.weight"].float()
        return Merging(reduction, self.norm(f"{at}downsample.norm"), self._scales(stage, 0))

    def _read(self, bias: Tensor) -> Tensor:
        """fc1's bias as the kernel of GELU reads it from where it is stored."""
        return as_read(shifted(bias) if self.shifted else bias, len(bias)) if self.misread else bias

    def _attention(self, stage: int, at: str, shifted: bool, scales: Scales) -> AttentionWeights:
        g, packed = self.g, "trt_" if self.fused else ""  # the fused kernels read the packed form
        qkv = self.layer(f"{at}attn.qkv")
        own_scale = head_dim(g) ** -0.5 if self.version == 1 else 1.0
        return AttentionWeights(
            qkv=qkv.kernel,
            qkv_bias=qkv.bias.float(),
            heads=g.heads[stage],
            bias=self._tensors[f"{at}attn.{packed}relative_position_bias"].float(),
            mask=self._tensors[f"layers.{stage}.{packed}attn_mask"].float() if shifted else None,
            qk_scale=own_scale if g.qk_scale is None or is_default_scale(g) else g.qk_scale,
            logit_scale=self._tensors[f"{at}attn.logit_scale"].float() if self.version == 2 else None,
            scales=scales,
        )

    def _scales(self, stage: int, block: int) -> Scales:
        return Scales(self._tensors[f"layers.{stage}.blocks.{block}.amaxList"].tolist(), self.version)
