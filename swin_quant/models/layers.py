"""Parts that Swin V1 and V2 share: normalisation in float32, MLP, patch embedding, the stage, the whole network.

They compute on tokens, or on maps of any size (`Geometry.on_maps`); parameters and nodes are the same.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from swin_quant.models.classifier import Classifier
from swin_quant.models.geometry import Geometry
from swin_quant.models.maps import Cut, mask, neighbours, patches, window_partition, window_reverse
from swin_quant.quant.layer import ChannelFactors, QuantLinear
from swin_quant.quant.quantizer import Quantizer, Role


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in float32 under any autocast; the result has the type of the parameters.

    `follows_input`: the result has the type of the input, in a half network whose norms keep float32 parameters.
    """

    follows_input = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        normalised = F.layer_norm(self.scaled(x.float()), self.normalized_shape, weight, bias, self.eps)
        return normalised.to(x.dtype if self.follows_input else self.weight.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        """The values that are normalised, float32."""
        return x


class StreamNorm(LayerNorm):
    """The norm after a residual stream whose channels products read directly. It compares channels, so `factors`
    multiply them by the factors that passes divided them by."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.factors = ChannelFactors(channels)

    def scaled(self, x: Tensor) -> Tensor:
        return self.factors(x)


class DropPath(nn.Module):
    """Drop the branch of a picture with probability `rate` while training; kept ones are scaled up. Keeps the shape.

    Huang et al., "Deep Networks with Stochastic Depth", 2016. The draws are those of timm's module of the same name.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.rate or not self.training:
            return x
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Mlp(nn.Module):
    """fc1, exact GELU, fc2. [..., C] -> [..., C]."""

    def __init__(self, dim: int, hidden: int, drop: float) -> None:
        super().__init__()
        self.fc1 = QuantLinear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = QuantLinear(hidden, dim)
        self.fc2._input_quantizer.role = Role.ONE_SIDED_INPUT
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class PatchEmbed(nn.Module):
    """Pictures to tokens by a strided convolution, never quantized. [B, in, S, S] -> [B, (S / patch)**2, C], or maps.

    Patches do not overlap, so the convolution is one matrix product; convolution kernels, chosen by shape, give a
    picture other last bits in another batch. The result opens the residual stream, in the type of the parameters.
    """

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.on_maps = g.on_maps
        self.proj = nn.Conv2d(g.in_chans, g.embed_dim, kernel_size=g.patch_size, stride=g.patch_size)
        self.norm = LayerNorm(g.embed_dim) if g.patch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        patch = self.proj.kernel_size[0]
        if self.on_maps:
            x = patches(x, patch)
        else:
            batch, channels, height, width = x.shape
            rows, columns = height // patch, width // patch
            x = x.reshape(batch, channels, rows, patch, columns, patch)
            x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch * patch)
        return self.norm(F.linear(x, self.proj.weight.flatten(1), self.proj.bias)).to(self.proj.weight.dtype)


class PatchMerging(nn.Module):
    """Halve the map and double the channels. [B, H * W, C] -> [B, H * W / 4, 2C], or [B, H, W, C] -> half of each."""

    norm_first: bool  # whether the norm comes before the reduction

    def __init__(self, g: Geometry, stage: int) -> None:
        super().__init__()
        self.on_maps = g.on_maps
        self.resolution = 0 if g.on_maps else g.resolution(stage)
        dim = g.embed_dim * 2**stage
        self.reduction = QuantLinear(4 * dim, 2 * dim, bias=False)
        self.norm = LayerNorm(4 * dim if self.norm_first else 2 * dim)

    def merge(self, x: Tensor) -> Tensor:
        """[B, H * W, C] -> [B, H * W / 4, 4C], neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
        if self.on_maps:
            return neighbours(x)
        side, channels = self.resolution // 2, x.shape[-1]
        x = x.view(-1, side, 2, side, 2, channels).permute(0, 1, 3, 4, 2, 5)  # [B, side, side, column, row, C]
        return x.reshape(-1, side * side, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        stream, x = x.dtype, self.merge(x)
        x = self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x))
        return x.to(stream)  # float32 under autocast


class Attention(nn.Module):
    """Attention inside windows, with the nodes of both versions. [B * nW, L, C] -> [B * nW, L, C]."""

    heads: int

    def add_parts(self, qkv: QuantLinear, drop: float, operands: Role) -> None:
        """Add the linears, and the nodes of q, k, v and the softmax; `operands`: the role of q and k."""
        self.qkv = qkv
        self.proj = QuantLinear(qkv.in_features, qkv.in_features)
        self.proj_drop = nn.Dropout(drop)
        self.matmul_q_input_quantizer = Quantizer(operands)
        self.matmul_k_input_quantizer = Quantizer(operands)
        self.matmul_v_input_quantizer = Quantizer(Role.MATMUL_INPUT)
        self.matmul_a_input_quantizer = Quantizer(Role.SOFTMAX_OUTPUT)

    def logits(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The input of the softmax, [B * nW, heads, L, L], for q and k [B * nW, heads, L, D] and mask [nW, L, L]."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        windows, length, channels = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = self.matmul_q_input_quantizer(q), self.matmul_k_input_quantizer(k), self.matmul_v_input_quantizer(v)
        logits = self.logits(q, k, mask)
        attention = self.matmul_a_input_quantizer(logits.softmax(dim=-1, dtype=torch.float32).to(v.dtype))
        x = (attention @ v).transpose(1, 2).reshape(windows, length, channels)
        return self.proj_drop(self.proj(x))


def add_bias_and_mask(logits: Tensor, scale: float, bias: Tensor, mask: Tensor | None) -> Tensor:
    """scale * logits + bias (+ mask). logits: [B * nW, heads, L, L]; bias: [heads, L, L]; mask: [nW, L, L]."""
    if mask is None:
        return torch.add(bias, logits, alpha=scale)
    windows, heads, length, _ = logits.shape
    by_window = logits.view(-1, len(mask), heads, length, length)
    return torch.add(bias + mask[:, None], by_window, alpha=scale).view(-1, heads, length, length)


class WindowBlock(nn.Module):
    """A Swin block except for its order of norms: windows, shift, mask, attention, MLP and the nodes around them.

    A map no larger than the window is one window, unshifted. [B, R * R, C] -> [B, R * R, C], or maps [B, H, W, C],
    whose masks are computed for each call. Block `index` of a stage.
    """

    ends_in_norms = False  # whether norms come after the branches

    def __init__(self, attn: nn.Module, g: Geometry, stage: int, index: int, drop_path: float) -> None:
        super().__init__()
        dim = g.embed_dim * 2**stage
        self.norm1 = LayerNorm(dim)
        self.attn = attn
        self.drop_path = DropPath(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * g.mlp_ratio), g.drop)
        self.attn_mask: Tensor | None
        self.register_buffer("attn_mask", None)
        if g.on_maps:
            self.cut = Cut(g.windows(stage), g.shifts(stage, index), g.whole_windows, g.rests)
        else:
            self.resolution = side = g.resolution(stage)
            self.window, (self.shift, _) = g.window_in_use(stage), g.shifts(stage, index)
            self.attn_mask = mask(side, side, g.windows(stage), g.shifts(stage, index)) if self.shift else None
        self.on_maps = g.on_maps
        self.layernorm_input1_quantizer = Quantizer(Role.NORM_INPUT)
        self.layernorm_input2_quantizer = Quantizer(Role.NORM_INPUT)
        self.add1_local_input_quantizer = Quantizer(Role.RESIDUAL)
        self.add1_residual_input_quantizer = Quantizer(Role.RESIDUAL)
        self.add2_local_input_quantizer = Quantizer(Role.RESIDUAL)
        self.add2_residual_input_quantizer = Quantizer(Role.RESIDUAL)

    def window_attention(self, x: Tensor) -> Tensor:
        """Attention inside (shifted) windows; the result has x's shape."""
        if self.on_maps:
            windows = self.cut.partition(x)
            return self.cut.reverse(self.attn(windows.flatten(0, 1), self.cut.mask(x)).view_as(windows), x)
        side, tokens, channels = self.resolution, x.shape[1], x.shape[2]
        x = x.view(-1, side, side, channels)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), dims=(1, 2))
        x = self.attn(window_partition(x, self.window), self.attn_mask)
        x = window_reverse(x, self.window, side, side)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), dims=(1, 2))
        return x.view(-1, tokens, channels)


class Stage(nn.Module):
    """Blocks at one resolution, then patch merging unless it is the last stage.

    While training with `checkpointing`, a block keeps only its input and is computed again in the backward pass.
    """

    def __init__(self, blocks: Sequence[WindowBlock], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = cast("list[WindowBlock]", nn.ModuleList(blocks))  # for the type checker
        self.downsample = downsample
        self.checkpointing = False

    def through_blocks(self, x: Tensor) -> Tensor:
        """The output of the stage before its map is halved."""
        for block in self.blocks:
            if not (self.checkpointing and self.training):
                x = block(x)
            elif all(weight.dtype == torch.float32 for weight in block.parameters()):
                x = checkpoint(block, x, use_reentrant=False)
            else:  # with the tensors of now: half copies are gone in the backward pass
                tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
                x = checkpoint(functional_call, block, tensors, (x,), use_reentrant=False)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.through_blocks(x)
        return x if self.downsample is None else self.downsample(x)


def initialise(module: nn.Module) -> None:
    """Weights for training from scratch: truncated normal; a branch that ends in a norm starts as zero."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, WindowBlock) and module.ends_in_norms:
        nn.init.zeros_(module.norm1.weight)
        nn.init.zeros_(module.norm2.weight)


BlockFactory = Callable[[Geometry, int, int, float], WindowBlock]


class Swin(Classifier):
    """Pictures [B, in, S, S], or of other sides on maps, to logits [B, classes]; its blocks decide the version."""

    def __init__(self, geometry: Geometry, block: BlockFactory, merging: type[PatchMerging]) -> None:
        g = geometry
        super().__init__((g.in_chans, *g.sides), g.classes)
        self.geometry = g
        self.patch_embed = PatchEmbed(g)
        tokens = math.prod(g.tokens(0))
        self.absolute_pos_embed = nn.Parameter(torch.zeros(1, tokens, g.embed_dim)) if g.ape else None
        self.pos_drop = nn.Dropout(g.drop)
        rates = iter(np.linspace(0.0, g.drop_path, sum(g.depths)).tolist())
        last = len(g.depths) - 1
        stages = [
            Stage([block(g, i, j, next(rates)) for j in range(depth)], merging(g, i) if i < last else None)
            for i, depth in enumerate(g.depths)
        ]
        self.layers = cast("list[Stage]", nn.ModuleList(stages))
        self.norm = (LayerNorm if merging.norm_first else StreamNorm)(g.embed_dim * 2**last)
        self.head = nn.Linear(g.embed_dim * 2**last, g.classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """Pooled features: [B, in, S, S] -> [B, 8 * embed_dim] (for four stages). UsageError for another size."""
        self.check(x)
        x = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = x + self.absolute_pos_embed
        x = self.pos_drop(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(dim=(1, 2) if self.geometry.on_maps else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))
