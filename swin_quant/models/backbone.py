"""Swin V1 and V2 on maps, built from the classifier's parts: a backbone takes pictures of any size and gives the maps
of some stages; a classifier takes pictures that are not square.

Nodes and parameters have the classifier's names, so its ranges and weights serve here. Each output may have its own
norm, `norm0` to `norm3`, as in Microsoft's detection and segmentation code, or the last output has the classifier's,
`norm`.
"""

from dataclasses import replace

from torch import Tensor
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import EACH, FEATURES, LAST, MMPRETRAIN, TIMM, select_stages
from swin_quant.config.swin import SWIN, SWINV2
from swin_quant.models import swin, swin_v2
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.models.layers import BlockFactory, LayerNorm, PatchMerging, Swin, initialise

_PARTS: dict[str, tuple[BlockFactory, type[PatchMerging]]] = {
    SWIN.name: (swin.build_block, swin.SwinPatchMerging),
    SWINV2.name: (swin_v2.build_block, swin_v2.SwinV2PatchMerging),
}
_MASKS = r"layers\.\d+\.blocks\.\d+\.attn_mask$"  # keys of a checkpoint: maps need others


class MapSwin(Swin):
    """Pictures [B, in, H, W] -> logits [B, classes], with the sides that the geometry has; as timm, which pads maps."""

    rewrites = "swin_maps"
    left_out: str | None = _MASKS


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


def build_map_swin(cfg: CfgNode) -> MapSwin:
    """Swin of a config on maps: a backbone or a classifier, by MODEL.OUTPUT_KIND, weights as for training."""
    block, merging = _PARTS[cfg.MODEL.TYPE]
    windows = cfg.MODEL.FEATURES.WINDOWS if cfg.MODEL.OUTPUT_KIND == FEATURES else TIMM
    geometry = replace(read_geometry(cfg), whole_windows=windows != TIMM, rests=windows == MMPRETRAIN, on_maps=True)
    if cfg.MODEL.OUTPUT_KIND != FEATURES:
        return MapSwin(geometry, block, merging).apply(initialise)
    stages = select_stages(cfg, len(geometry.depths))
    return Backbone(geometry, block, merging, stages, cfg.MODEL.FEATURES.NORM).apply(initialise)
