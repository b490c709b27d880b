"""Swin V1 and V2 on maps, built from the classifier's parts: a backbone takes pictures of any size and gives the maps
of some stages; a classifier takes pictures that are not square.

Nodes and parameters have the classifier's names, so its ranges and weights serve here. Each output may have its own
norm, `norm0` to `norm3`, as in Microsoft's detection and segmentation code, or the last output has the classifier's,
`norm`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import EACH, FEATURES, LAST, MMPRETRAIN, TIMM, select_stages
from swin_quant.models import swin, swin_v2
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.models.layers import BlockFactory, LayerNorm, PatchEmbed, PatchMerging, Swin, WindowBlock, initialise
from swin_quant.models.maps import Cut, neighbours, patches

_MASKS = r"layers\.\d+\.blocks\.\d+\.attn_mask$"  # keys of a checkpoint: maps need others


class MapBlock(WindowBlock):
    """A block on maps [B, H, W, C] of any size. Masks depend on the map and are computed for each call."""

    def set_windows(self, g: Geometry, stage: int, index: int) -> None:
        self.cut = Cut(g.windows(stage), g.shifts(stage, index), g.whole_windows, g.rests)
        self.register_buffer("attn_mask", None)

    def window_attention(self, x: Tensor) -> Tensor:
        """Attention inside (shifted) windows. [B, H, W, C] -> [B, H, W, C]."""
        windows = self.cut.partition(x)
        return self.cut.reverse(self.attn(windows.flatten(0, 1), self.cut.mask(x)).view_as(windows), x)


class MapMerging(PatchMerging):
    """Patch merging of maps: [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), 2C]."""

    def set_map(self, g: Geometry, stage: int) -> None:
        """Nothing: maps tell."""

    def merge(self, x: Tensor) -> Tensor:
        return neighbours(x)


class SwinMapBlock(MapBlock, swin.SwinBlock):
    """V1's order of norms."""


class SwinV2MapBlock(MapBlock, swin_v2.SwinV2Block):
    """V2's order of norms."""


class SwinMapMerging(MapMerging, swin.SwinPatchMerging):
    """V1's patch merging: the norm, then the reduction."""


class SwinV2MapMerging(MapMerging, swin_v2.SwinV2PatchMerging):
    """V2's patch merging: the reduction, then the norm."""


class MapEmbed(PatchEmbed):
    """Patches of pictures of any size: [B, in, H, W] -> [B, ceil(H / patch), ceil(W / patch), C]."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.linear(patches(x, self.proj.kernel_size[0]), self.proj.weight.flatten(1), self.proj.bias)
        return self.norm(tokens).to(self.proj.weight.dtype)


class MapSwin(Swin):
    """Pictures [B, in, H, W] -> logits [B, classes], with the sides that the geometry has; as timm, which pads maps."""

    rewrites = "swin_maps"
    left_out: str | None = _MASKS

    def __init__(self, g: Geometry, block: BlockFactory, merging: type[PatchMerging]) -> None:
        super().__init__(g, block, merging)
        self.patch_embed = MapEmbed(g.patch_size, g.in_chans, g.embed_dim, g.patch_norm)

    def forward_features(self, x: Tensor) -> Tensor:
        """Pooled features: [B, in, H, W] -> [B, 8 * embed_dim] (for four stages). UsageError for another size."""
        self.check(x)
        x = self.pos_drop(self.patch_embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(dim=(1, 2))


class Backbone(MapSwin):
    """Pictures [B, in, H, W] -> maps [B, C * 2**i, ceil(H / patch / 2**i), ceil(W / patch / 2**i)] of some stages i.

    `stages`: their numbers, ascending; the network ends after the last one. `norms`: as MODEL.FEATURES.NORM.
    """

    output_kind = FEATURES

    def __init__(
        self, geometry: Geometry, block: BlockFactory, merging: type[PatchMerging], stages: tuple[int, ...], norms: str
    ) -> None:
        last, every = stages[-1], len(geometry.depths)
        super().__init__(replace(geometry, depths=geometry.depths[: last + 1]), block, merging)
        self.output_stages, self.norms, self.classes = stages, norms, 0
        g = self.geometry
        del self.head
        if norms != LAST:
            del self.norm
        for stage in stages if norms == EACH else ():
            self.add_module(f"norm{stage}", LayerNorm(g.embed_dim * 2**stage))
        behind = [rf"layers\.{stage}\." for stage in range(last + 1, every)]
        behind += [rf"layers\.{last}\.downsample\."] if last + 1 < every else []
        unused = [r"head\.", _MASKS, *behind]
        unused += [] if norms == LAST else [r"norm\."]
        unused += [] if norms == EACH else [r"norm\d+\."]
        self.left_out = "|".join(unused)

    def normed(self, x: Tensor, stage: int) -> Tensor:
        """The output for the map [B, H, W, C] of a stage, channels last."""
        if self.norms == EACH:
            return self.get_submodule(f"norm{stage}")(x)
        return self.norm(x) if self.norms == LAST and stage == len(self.geometry.depths) - 1 else x

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override] # maps instead of logits
        """The maps of the stages. UsageError for pictures smaller than a patch."""
        if min(x.shape[-2:]) < (least := self.geometry.patch_size):
            raise UsageError(f"pictures of {x.shape[-2]} x {x.shape[-1]}: must be of {least} x {least} pixels at least")
        found, x = [], self.patch_embed(x)
        for stage, layer in enumerate(self.layers):
            x = layer.through_blocks(x)
            if stage in self.output_stages:
                found.append(self.normed(x, stage).permute(0, 3, 1, 2).contiguous())
            if layer.downsample is not None:
                x = layer.downsample(x)
        return found


def _build_map_swin(
    cfg: CfgNode, factory: Callable[..., WindowBlock], kind: type[MapBlock], merging: type[MapMerging]
) -> MapSwin:
    """A backbone or a classifier, by MODEL.OUTPUT_KIND, of blocks of this kind."""
    windows = cfg.MODEL.FEATURES.WINDOWS if cfg.MODEL.OUTPUT_KIND == FEATURES else TIMM
    geometry = replace(read_geometry(cfg), whole_windows=windows != TIMM, rests=windows == MMPRETRAIN)
    block = partial(factory, kind=kind)
    if cfg.MODEL.OUTPUT_KIND != FEATURES:
        return MapSwin(geometry, block, merging)
    return Backbone(geometry, block, merging, select_stages(cfg, len(geometry.depths)), cfg.MODEL.FEATURES.NORM)


def build_map_swin(cfg: CfgNode) -> MapSwin:
    """Swin V1 of a config on maps, weights as initialised for training."""
    return _build_map_swin(cfg, swin.build_block, SwinMapBlock, SwinMapMerging).apply(initialise)


def build_map_swin_v2(cfg: CfgNode) -> MapSwin:
    """Swin V2 of a config on maps, weights as initialised for training."""
    model = _build_map_swin(cfg, swin_v2.build_block, SwinV2MapBlock, SwinV2MapMerging)
    swin_v2.start(model)
    return model
