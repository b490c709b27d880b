"""Swin Transformer V1: pre-norm blocks, scaled dot-product attention, a table of relative position biases.

Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021. Node names and places:
docs/reference, sections 1.3 and 1.4.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.config.swin import SWIN
from swin_quant.models.classifier import Architecture
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.models.layers import Attention, PatchMerging, Swin, WindowBlock, add_bias_and_mask, initialise
from swin_quant.models.maps import offset_index
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.passes.places import Exchange, Part
from swin_quant.quant.quantizer import Quantizer, Role


class WindowAttention(Attention):
    """Scaled dot-product attention."""

    def __init__(
        self, dim: int, windows: tuple[int, int], heads: int, qkv_bias: bool, qk_scale: float | None, drop: float
    ) -> None:
        super().__init__()
        self.window_sides, self.heads = windows, heads
        self.scale = qk_scale or (dim // heads) ** -0.5
        self.add_parts(QuantLinear(dim, 3 * dim, bias=qkv_bias), drop, Role.MATMUL_INPUT)
        offsets = math.prod(2 * side - 1 for side in windows)  # that two tokens of a window may have
        self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets, heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", offset_index(windows))
        self.softmax_input_quantizer = Quantizer(Role.SOFTMAX_INPUT)

    def relative_position_bias(self) -> Tensor:
        """float [heads, L, L]."""
        return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)

    def logits(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        products = self.softmax_input_quantizer(q @ k.transpose(-2, -1))
        return add_bias_and_mask(products, self.scale, self.relative_position_bias(), mask)


class SwinBlock(WindowBlock):
    """x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def forward(self, x: Tensor) -> Tensor:
        branch = self.drop_path(self.window_attention(self.norm1(self.layernorm_input1_quantizer(x))))
        x = self.add1_local_input_quantizer(branch) + self.add1_residual_input_quantizer(x)
        branch = self.drop_path(self.mlp(self.norm2(self.layernorm_input2_quantizer(x))))
        return self.add2_local_input_quantizer(branch) + self.add2_residual_input_quantizer(x)


class SwinPatchMerging(PatchMerging):
    """Norm of the 4C merged channels, then the reduction."""

    norm_first = True


def build_block(g: Geometry, stage: int, index: int, drop_path: float) -> SwinBlock:
    """Block `index` of a stage, weights as initialised for training."""
    dim, windows = g.embed_dim * 2**stage, g.windows(stage)
    attn = WindowAttention(dim, windows, g.heads[stage], g.qkv_bias, g.qk_scale, g.drop)
    return SwinBlock(attn, g, stage, index, drop_path)


def _build(cfg: CfgNode) -> Swin:
    return Swin(read_geometry(cfg), build_block, SwinPatchMerging).apply(initialise)


_ATTN = "layers.*.blocks.*.attn"
_Q, _K, _V = (Part(f"{_ATTN}.qkv", index=index, of=3) for index in range(3))


def _parameters(part: Part) -> tuple[Part, ...]:
    return tuple(replace(part, name=f"{part.name}.{kind}") for kind in ("weight", "bias"))


ARCHITECTURE = Architecture(
    SWIN,
    _build,
    blocks="layers.*.blocks.*",
    stages="layers.*",
    pairs=(
        ("layers.*.blocks.*.norm1", ("layers.*.blocks.*.attn.qkv",)),
        ("layers.*.blocks.*.norm2", ("layers.*.blocks.*.mlp.fc1",)),
        ("layers.*.downsample.norm", ("layers.*.downsample.reduction",)),
    ),
    exchanges=(
        # Attention's weights sum to one for each channel of v: proj multiplies by v's divisor.
        Exchange(
            scaled=_V,
            before=_parameters(_V),
            after=(Part(f"{_ATTN}.proj.weight", dim=1),),
            offset=_parameters(_V)[1],
            into=(f"{_ATTN}.proj",),
            peers=(_Q, _K),
        ),
        Exchange(scaled=_K, offset=_parameters(_K)[1]),  # adds the same to all logits of a query, which softmax ignores
        Exchange(scaled=_Q, before=_parameters(_Q), after=_parameters(_K), partner=_K),
    ),
    padded=(_ATTN,),
    units=("layers.*.blocks.*", "layers.*.downsample"),
    no_decay=("absolute_pos_embed", "relative_position_bias_table"),
    rewrites="swin",
    backbone="swin_quant.models.backbone:build_map_swin",
    pads=True,
)
