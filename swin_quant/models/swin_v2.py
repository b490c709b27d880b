"""Swin Transformer V2: norms after the branches, cosine attention, position biases from an MLP.

Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", 2022. Node names and places:
docs/reference, sections 1.3 and 1.4.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.config.swin import SWINV2
from swin_quant.models.classifier import Architecture
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.models.layers import Attention, PatchMerging, Swin, WindowBlock, add_bias_and_mask, initialise
from swin_quant.models.maps import offset_coordinates, offset_index
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.passes.places import Exchange, Part
from swin_quant.quant.quantizer import Quantizer, Role

LARGEST_LOGIT_SCALE = math.log(100.0)
SMALLEST_NORM = 1e-12  # the divisor for a vector of zeros


class CosineQkv(QuantLinear):
    """q, k and v of cosine attention. [..., C] -> [..., 3C].

    The bias is q's, zeros, and v's. Both are stored in the attention, under the checkpoints' names.
    """

    def __init__(self, dim: int, attention: "WindowAttentionV2") -> None:
        super().__init__(dim, 3 * dim, bias=False)
        self._attention = (attention,)  # in a tuple, or torch would register the parent as its own child's child

    def effective_bias(self) -> Tensor | None:
        q, v = self._attention[0].q_bias, self._attention[0].v_bias
        return None if q is None or v is None else torch.cat([q, torch.zeros_like(q), v])

    @torch.no_grad()
    def shift_bias(self, shift: Tensor) -> None:
        """k has no offset: no key of a checkpoint could hold it."""
        for place, bias in ((0, self._attention[0].q_bias), (2, self._attention[0].v_bias)):
            if bias is not None:
                bias.add_(shift.view(3, -1)[place])

    def shiftable(self) -> Tensor:
        q, v = self._attention[0].q_bias, self._attention[0].v_bias
        reached = torch.tensor([q is not None, False, v is not None], device=self.weight.device)
        return reached.repeat_interleave(len(self.weight) // 3)


class WindowAttentionV2(Attention):
    """Cosine attention."""

    def __init__(
        self, dim: int, windows: tuple[int, int], heads: int, qkv_bias: bool, drop: float, pretrained: int
    ) -> None:
        super().__init__()
        self.heads = heads
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False))
        self.relative_coords_table: Tensor
        self.register_buffer("relative_coords_table", offset_coordinates(windows, pretrained))
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", offset_index(windows))
        self.q_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None  # k has none, as in Microsoft's
        self.v_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias else None
        self.add_parts(CosineQkv(dim, self), drop, Role.NORMALIZE_INPUT)
        self.mha_q_input_quantizer = Quantizer(Role.MATMUL_INPUT)
        self.mha_k_input_quantizer = Quantizer(Role.MATMUL_INPUT)
        self.softmax_input_quantizer = Quantizer(Role.SOFTMAX_INPUT)

    def relative_position_bias(self) -> Tensor:
        """float [heads, L, L], in (0, 16)."""
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.heads)
        return 16 * torch.sigmoid(table[self.relative_position_index].permute(2, 0, 1).float())

    def logits(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scale = self.logit_scale.clamp(max=LARGEST_LOGIT_SCALE).exp()
        q = self.mha_q_input_quantizer(_unit(q.float(), scale))
        k = self.mha_k_input_quantizer(_unit(k.float()).transpose(-2, -1))
        return add_bias_and_mask(self.softmax_input_quantizer(q @ k), 1.0, self.relative_position_bias(), mask)


def _unit(x: Tensor, length: Tensor | float = 1.0) -> Tensor:
    """x with vectors of `length`. One factor a vector, not a quotient an element: half the time of F.normalize."""
    return x * (length / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SMALLEST_NORM))


class SwinV2Block(WindowBlock):
    """x + norm1(attention(x)), then x + norm2(mlp(x))."""

    ends_in_norms = True

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm1(self.layernorm_input1_quantizer(self.window_attention(x)))
        x = self.drop_path(self.add1_local_input_quantizer(branch)) + self.add1_residual_input_quantizer(x)
        branch = self.norm2(self.layernorm_input2_quantizer(self.mlp(x)))
        return self.drop_path(self.add2_local_input_quantizer(branch)) + self.add2_residual_input_quantizer(x)


class SwinV2PatchMerging(PatchMerging):
    """The reduction, then the norm of its 2C channels."""

    norm_first = False


def build_block(g: Geometry, stage: int, index: int, drop_path: float) -> SwinV2Block:
    """Block `index` of a stage, weights as initialised for training."""
    dim, windows = g.embed_dim * 2**stage, g.windows(stage)
    attn = WindowAttentionV2(dim, windows, g.heads[stage], g.qkv_bias, g.drop, g.pretrained_windows[stage])
    return SwinV2Block(attn, g, stage, index, drop_path)


def _build(cfg: CfgNode) -> Swin:
    return Swin(read_geometry(cfg), build_block, SwinV2PatchMerging).apply(initialise)


def get_version(model: Swin) -> int:
    """The Swin version, 1 or 2."""
    return 2 if isinstance(model.layers[0].blocks[0].attn, WindowAttentionV2) else 1


def streams(model: nn.Module) -> Iterator[Exchange]:
    """The residual stream of each stage, with its writers and readers. After the last, `norm` undoes the factors."""
    swin = cast(Swin, model)
    source = "patch_embed.proj" if isinstance(swin.patch_embed.norm, nn.Identity) else "patch_embed.norm"
    position = () if swin.absolute_pos_embed is None else (Part("absolute_pos_embed", dim=2),)
    for at, stage in ((f"layers.{number}", stage) for number, stage in enumerate(swin.layers)):
        blocks = [f"{at}.blocks.{number}" for number in range(len(stage.blocks))]
        adding = [source, *(f"{block}.{norm}" for block in blocks for norm in ("norm1", "norm2"))]
        reading = [f"{block}.{linear}" for block in blocks for linear in ("attn.qkv", "mlp.fc1")]
        merging = [(f"{at}.downsample.reduction", neighbour) for neighbour in range(4)] if stage.downsample else []
        shown, *also = (Part(f"{linear}._input_quantizer") for linear in reading)
        yield Exchange(
            scaled=shown,
            also=(*also, *(Part(f"{linear}._input_quantizer", index=index, of=4) for linear, index in merging)),
            before=(*(Part(f"{layer}.{kind}") for layer in adding for kind in ("weight", "bias")), *position),
            after=(
                *(Part(f"{linear}.weight", dim=1) for linear in reading),
                *(Part(f"{linear}.weight", dim=1, index=index, of=4) for linear, index in merging),
            ),
            stream=True,
            exit=None if stage.downsample else "norm.factors",
        )
        source, position = f"{at}.downsample.norm", ()


_ATTN = "layers.*.blocks.*.attn"
_Q, _K, _V = (Part(f"{_ATTN}.qkv", index=index, of=3) for index in range(3))
_WQ, _WK, _WV = (Part(f"{_ATTN}.qkv.weight", index=index, of=3) for index in range(3))

# No pairs: a norm's output is added to the residual stream, which has many writers and readers.
ARCHITECTURE = Architecture(
    SWINV2,
    _build,
    blocks="layers.*.blocks.*",
    stages="layers.*",
    exchanges=(
        Exchange(
            scaled=_V,
            before=(_WV, Part(f"{_ATTN}.v_bias")),
            after=(Part(f"{_ATTN}.proj.weight", dim=1),),
            offset=Part(f"{_ATTN}.v_bias"),
            into=(f"{_ATTN}.proj",),
        ),
        # Cosine attention divides each head's q and k by its length.
        Exchange(scaled=_Q, before=(_WQ, Part(f"{_ATTN}.q_bias")), partner=_V, heads=_ATTN),
        Exchange(scaled=_K, before=(_WK,), partner=_V, heads=_ATTN),
    ),
    streams=streams,
    units=("layers.*.blocks.*", "layers.*.downsample"),
    no_decay=("absolute_pos_embed", "cpb_mlp", "logit_scale"),
    rewrites="swin",
    backbone="swin_quant.models.backbone:build_map_swin",
    pads=True,
)
