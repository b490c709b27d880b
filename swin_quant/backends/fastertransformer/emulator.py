"""Emulate FasterTransformer's INT8 Swin, from an export alone (docs/reference, section 3.8).

Integers are exact, and every rounding in the kernels' published source is made at the same place: int8 between GEMMs,
float16 in the residual stream, biases and norms. Whole numbers in float32 tensors stand for integers, for fast GEMMs.
Window attention is computed as by the fused or the unfused kernels. Pooled features are float16; the head, outside the
op, is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.fastertransformer.gelu_bias import as_read, shifted
from swin_quant.backends.fastertransformer.interface import is_default_scale
from swin_quant.backends.fastertransformer.limits import computed_rows
from swin_quant.backends.fastertransformer.manifest import Stored
from swin_quant.backends.fastertransformer.slots import head_dim
from swin_quant.backends.fastertransformer.weights import REDUCTION, Scales
from swin_quant.backends.integer_arithmetic import as_half, gelu_table, normed, product, rounded
from swin_quant.base.errors import UsageError
from swin_quant.models.maps import window_partition, window_reverse

NORMALIZE_EPSILON = SOFTMAX_EPSILON = 1e-6


@dataclass(frozen=True)
class AttentionWeights:
    """One block's attention. int8 weights are whole numbers in float32; `bias` [heads, L, L] and `mask` [nW, L, L], or
    None, are float32.

    `qk_scale` multiplies the logits; `logit_scale` [heads, 1, 1] is V2's, None in V1.
    """

    qkv: Tensor
    qkv_bias: Tensor
    heads: int
    bias: Tensor
    mask: Tensor | None
    qk_scale: float
    logit_scale: Tensor | None
    scales: Scales


def attention(x: Tensor, w: AttentionWeights, fused: bool) -> Tensor:
    """int8 context, at the range of the projection's input, from int8 tokens. [B * nW, L, C] -> [B * nW, L, C]."""
    s = w.scales
    sums = rounded(product(x, w.qkv) * s.gemm("attn.qkv"))
    real = (sums * s.step("attn.qkv._aftergemm_quantizer") + w.qkv_bias).unflatten(-1, (3, w.heads, -1))
    q, k, v = (
        rounded(part * s.levels(f"attn.matmul_{name}_input_quantizer"))
        for name, part in zip("qkv", real.permute(2, 0, 3, 1, 4), strict=True)
    )
    if w.logit_scale is not None:
        q = _normalized(q, "q", s, w.logit_scale)
        k = _normalized(k, "k", s, 1.0)
    products = q @ k.transpose(-2, -1)  # exact: sums of 32 or 64 products
    probabilities = (_fused_softmax if fused else _unfused_softmax)(products, w)
    context = probabilities @ v  # exact: at most 1024 products, in the largest window
    context = rounded(context * (s.fused("a v") if fused else s.gemm("a v")))
    return context.transpose(1, 2).flatten(2)


def _normalized(x: Tensor, name: str, s: Scales, factor: Tensor | float) -> Tensor:
    """V2: x / |x| * factor, int8 in and out."""
    real = x * s.step(f"attn.matmul_{name}_input_quantizer")
    norm = torch.rsqrt(real.square().sum(-1, keepdim=True) + NORMALIZE_EPSILON) * factor
    return rounded(real * norm * s.levels(f"attn.mha_{name}_input_quantizer"))


def _fused_softmax(products: Tensor, w: AttentionWeights) -> Tensor:
    """int8 probabilities from float logits; NVIDIA has not published how the fused kernel rounds inside."""
    logits = _add(products * (w.scales.fused("q k") * w.qk_scale), w)
    return rounded(logits.softmax(-1) * w.scales.fused("a"))


def _unfused_softmax(products: Tensor, w: AttentionWeights) -> Tensor:
    """int8 probabilities from logits that are rounded to int8."""
    logits = rounded(products * w.scales.gemm("q k")) * w.qk_scale
    logits = _add(logits * w.scales.step("attn.softmax_input_quantizer"), w)
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    share = powers * (1 / (powers.sum(-1, keepdim=True) + SOFTMAX_EPSILON))
    return rounded(share * w.scales.levels("attn.matmul_a_input_quantizer"))


def _add(logits: Tensor, w: AttentionWeights) -> Tensor:
    """Add position bias and mask to logits [B * nW, heads, L, L]."""
    if w.mask is None:
        return logits + w.bias
    by_window = logits.view(-1, len(w.mask), *logits.shape[1:])
    return (by_window + (w.bias + w.mask[:, None])).view_as(logits)


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

    def __call__(self, x: Tensor, epsilon: float) -> Tensor:
        """float32 [..., C] of a float16 or float32 x."""
        return normed(x, self.weight, self.bias, epsilon)


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
            gelu=gelu_table(step, self._read(fc1.bias), levels).float().flatten(),
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
        self.fused = case.fused if fused is None else fused
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
        x = self.norm(x, EPSILON).half()
        visit("norm", x)
        return x.flatten(1, 2).mean(1, dtype=torch.float32).half()

    def embed(self, images: Tensor) -> Tensor:
        """Images -> the residual stream, float16 [B, R, R, E]: convolution, bias and norm, each rounded."""
        batch, channels, side, _ = images.shape
        kernel = self.patch.kernel
        patch = kernel.shape[-1]
        x = images.half().float().reshape(batch, channels, side // patch, patch, side // patch, patch)
        x = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), kernel.flatten(1)).half() + self.patch.bias
        return self.patch_norm(x, EPSILON).half()

    def block(self, x: Tensor, b: Block) -> Tensor:
        """One block on the residual stream, float16 [B, R, R, C]."""
        s, epsilon = b.scales, BLOCK_EPSILON[self.version]
        before = b.norm1(x, epsilon) if self.version == 1 else x.float()
        y = self._attention(rounded(before * s.levels("attn.qkv._input_quantizer")), b)
        y = rounded(product(y, b.proj.kernel) * s.gemm("attn.proj"))
        step = s.step("attn.proj._aftergemm_quantizer")
        levels = s.levels("mlp.fc1._input_quantizer")
        if self.version == 1:
            after = x + (y * step).half() + b.proj.bias
            x, y = _where_computed(after, x), _where_computed(rounded(b.norm2(after, epsilon) * levels), y)
        else:
            given = b.norm1(y.half() * as_half(step) + b.proj.bias, epsilon) + x.float()
            x, y = given.half(), rounded(given * levels)
        y = look_up(b.gelu, rounded(product(y, b.fc1.kernel) * s.gemm("mlp.fc1")))
        sums, step = product(y, b.fc2.kernel), s.step("mlp.fc2._aftergemm_quantizer")
        if self.version == 2:
            y = rounded(sums * s.gemm("mlp.fc2")).half() * as_half(step) + b.fc2.bias
            return (b.norm2(y, epsilon) + x.float()).half()
        if self.int8_mode == 1:
            y = rounded(sums * s.gemm("mlp.fc2")) * step
        else:
            y = sums * (s.amax("mlp.fc2._input_quantizer") / 127) * (s.weight("mlp.fc2") / 127)
        return (y + b.fc2.bias + x.float()).half()

    def merge(self, x: Tensor, m: Merging) -> Tensor:
        """float16 [B, R, R, C] -> [B, R / 2, R / 2, 2C]; neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
        s = m.scales
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        levels = s.levels(f"{REDUCTION}._input_quantizer")
        x = rounded((m.norm(x, EPSILON) if self.version == 1 else x.float()) * levels)
        sums = product(x, m.reduction)
        if self.version == 1 and self.int8_mode == 2:
            return (sums * (1 / levels * (s.weight(REDUCTION) / 127))).half()
        x = rounded(sums * s.gemm(REDUCTION)) * s.step(f"{REDUCTION}._aftergemm_quantizer")
        return x.half() if self.version == 1 else m.norm(x, EPSILON).half()

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


def look_up(table: Tensor, x: Tensor) -> Tensor:
    """Entry x[..., c] + 128 of channel c in a flattened `gelu_table`. [..., hidden] -> [..., hidden]."""
    channels = 256 * torch.arange(x.shape[-1], device=x.device) + 128
    return table.index_select(0, (x + channels).int().flatten()).view_as(x)
