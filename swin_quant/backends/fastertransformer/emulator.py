"""Emulate FasterTransformer's INT8 Swin, from an export alone (docs/reference, section 3.8).

Integers are exact, and every rounding in the kernels' published source is made at the same place: int8 between GEMMs,
float16 in the residual stream, biases and norms. Pooled features are float16; the head, outside the op, is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.fastertransformer.arithmetic import (
    as_half,
    gelu_table,
    int8_gemm,
    layer_norm,
    look_up,
    to_int8,
)
from swin_quant.backends.fastertransformer.attention import AttentionWeights, attention
from swin_quant.backends.fastertransformer.gelu_bias import as_read, shifted
from swin_quant.backends.fastertransformer.interface import is_default_scale
from swin_quant.backends.fastertransformer.limits import is_fused
from swin_quant.backends.fastertransformer.rows import computed_rows
from swin_quant.backends.fastertransformer.scales import REDUCTION, Scales
from swin_quant.backends.fastertransformer.slots import head_dim
from swin_quant.backends.fastertransformer.stored import Stored
from swin_quant.base.errors import UsageError
from swin_quant.models.windows import window_partition, window_reverse


@dataclass(frozen=True)
class NetworkLayer:
    """A linear layer or convolution: float32 kernel, with whole numbers if it is int8, and float16 bias [n]."""

    kernel: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Norm:
    """float16 [C] each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Block:
    """One block; `gelu` is the table of GELU on fc1's results."""

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
    """Patch merging: kernel [2C, 4C], no bias, and the scales of the stage's block 0."""

    reduction: Tensor
    norm: Norm
    scales: Scales


class Reader:
    """Builds the parts of the network from the tensors of an export, on a device.

    With `misread` False, fc1's biases are the right ones, even where the GELU kernel would misread them.
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
        """fc1's bias as the GELU kernel reads it."""
        return as_read(shifted(bias) if self.shifted else bias, len(bias)) if self.misread else bias

    def _attention(self, stage: int, at: str, shifted: bool, scales: Scales) -> AttentionWeights:
        g, packed = self.g, "trt_" if self.fused else ""  # the fused kernels take the packed form
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


# V1's norms inside blocks have another epsilon than all others.
BLOCK_EPSILON = {1: 1e-5, 2: 1e-6}
EPSILON = 1e-6


class Emulator:
    """Images float [B, in, S, S] -> logits float32 [B, classes]. `fused` None: as the target GPU would run.

    With `misread` False, fc1's biases are the right ones (`gelu_bias`).
    """

    def __init__(self, stored: Stored, fused: bool | None = None, device: str = "cpu", misread: bool = True) -> None:
        case, self.device = stored.case, torch.device(device)
        self.version, self.int8_mode = case.form.version, case.int8_mode
        self.picture = (case.g.in_chans, case.g.image_size, case.g.image_size)
        self.fused = is_fused(case.g, case.form.sm) if fused is None else fused
        reader = Reader(stored, self.fused, self.device, misread)
        self.blocks = [[reader.block(i, j) for j in range(depth)] for i, depth in enumerate(case.g.depths)]
        self.mergings = [reader.merging(i) for i in range(len(case.g.depths) - 1)]
        self.patch, self.patch_norm = reader.layer("patch_embed.proj"), reader.norm("patch_embed.norm")
        self.norm = reader.norm("norm")
        self.head = [tensor.to(self.device) for tensor in stored.head]

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        return F.linear(self.features(images).float(), *self.head)

    def features(self, images: Tensor, visit: Callable[[str, Tensor], object] = lambda name, x: None) -> Tensor:
        """The op's result: pooled features, float16 [B, 8E]. UsageError for pictures of another size.

        Calls `visit` with each part's name and the residual stream after it.
        """
        if tuple(images.shape[1:]) != self.picture:
            wanted, given = (" x ".join(map(str, shape)) for shape in (self.picture, images.shape[1:]))
            raise UsageError(f"the export takes pictures of {wanted}, not {given}")
        x = self.embed(images.to(self.device))
        visit("patch_embed", x)
        for stage, blocks in enumerate(self.blocks):
            for index, block in enumerate(blocks):
                x = self.block(x, block)
                visit(f"layers.{stage}.blocks.{index}", x)
            if stage < len(self.mergings):
                x = self.merge(x, self.mergings[stage])
                visit(f"layers.{stage}.downsample", x)
        x = _normed(self.norm, EPSILON)(x).half()
        visit("norm", x)
        return x.flatten(1, 2).mean(1, dtype=torch.float32).half()

    def embed(self, images: Tensor) -> Tensor:
        """Images -> the residual stream, float16 [B, R, R, E]: convolution, bias and norm, each rounded."""
        batch, channels, side, _ = images.shape
        kernel = self.patch.kernel
        patch = kernel.shape[-1]
        x = images.half().float().reshape(batch, channels, side // patch, patch, side // patch, patch)
        x = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), kernel.flatten(1)).half() + self.patch.bias
        return _normed(self.patch_norm, EPSILON)(x).half()

    def block(self, x: Tensor, b: Block) -> Tensor:
        """One block on the residual stream, float16 [B, R, R, C]."""
        s, epsilon = b.scales, BLOCK_EPSILON[self.version]
        first, second = (_normed(norm, epsilon) for norm in (b.norm1, b.norm2))
        before = first(x) if self.version == 1 else x.float()
        y = self._attention(to_int8(before * s.levels("attn.qkv._input_quantizer")), b)
        y = to_int8(int8_gemm(y, b.proj.kernel) * s.gemm("attn.proj"))
        step = s.step("attn.proj._aftergemm_quantizer")
        levels = s.levels("mlp.fc1._input_quantizer")
        if self.version == 1:
            after = x + (y * step).half() + b.proj.bias
            x, y = _where_computed(after, x), _where_computed(to_int8(second(after) * levels), y)
        else:
            given = first(y.half() * as_half(step) + b.proj.bias) + x.float()
            x, y = given.half(), to_int8(given * levels)
        y = look_up(b.gelu, to_int8(int8_gemm(y, b.fc1.kernel) * s.gemm("mlp.fc1")))
        sums, step = int8_gemm(y, b.fc2.kernel), s.step("mlp.fc2._aftergemm_quantizer")
        if self.version == 2:
            y = to_int8(sums * s.gemm("mlp.fc2")).half() * as_half(step) + b.fc2.bias
            return (second(y) + x.float()).half()
        if self.int8_mode == 1:
            y = to_int8(sums * s.gemm("mlp.fc2")) * step
        else:
            y = sums * (s.amax("mlp.fc2._input_quantizer") / 127) * (s.weight("mlp.fc2") / 127)
        return (y + b.fc2.bias + x.float()).half()

    def merge(self, x: Tensor, m: Merging) -> Tensor:
        """float16 [B, R, R, C] -> [B, R / 2, R / 2, 2C]; neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
        s = m.scales
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        normed = _normed(m.norm, EPSILON)
        levels = s.levels(f"{REDUCTION}._input_quantizer")
        x = to_int8((normed(x) if self.version == 1 else x.float()) * levels)
        sums = int8_gemm(x, m.reduction)
        if self.version == 1 and self.int8_mode == 2:
            return (sums * (1 / levels * (s.weight(REDUCTION) / 127))).half()
        x = to_int8(sums * s.gemm(REDUCTION)) * s.step(f"{REDUCTION}._aftergemm_quantizer")
        return x.half() if self.version == 1 else normed(x).half()

    def _attention(self, x: Tensor, b: Block) -> Tensor:
        """int8 tokens -> int8 context, both in map order."""
        side = x.shape[1]
        x = torch.roll(x, (-b.shift, -b.shift), dims=(1, 2)) if b.shift else x
        x = window_reverse(attention(window_partition(x, b.window), b.attn, self.fused), b.window, side, side)
        return torch.roll(x, (b.shift, b.shift), dims=(1, 2)) if b.shift else x


def _where_computed(new: Tensor, old: Tensor) -> Tensor:
    """[B, R, R, C]: `new` in the rows that V1's norm after attention computes, `old` in the last rows, which it
    skips."""
    rows, channels = new[..., 0].numel(), new.shape[-1]
    computed = computed_rows(rows, channels)
    if computed == rows:
        return new
    return torch.where((torch.arange(rows, device=new.device) < computed).view_as(new[..., :1]), new, old)


def _normed(norm: Norm, epsilon: float) -> Callable[[Tensor], Tensor]:
    return lambda x: layer_norm(x, norm.weight, norm.bias, epsilon)
