"""The backbone whose parts were rewritten."""

from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.swin_maps.blocks import MapPatches
from swin_quant.base.errors import UsageError


class MapNetwork(nn.Module):
    """Pictures [B, in, H, W] -> maps [B, C, h, w], all of `io_type`; submodules keep the trained model's names."""

    patch_embed: Any
    layers: Any

    def __init__(self, model: Any, io_type: torch.dtype) -> None:
        super().__init__()
        if not isinstance(model.patch_embed, MapPatches):
            raise UsageError("a backbone is exported with the rewrite any-size: give it, too")
        for name, child in model.named_children():
            self.add_module(name, child)
        self.stages, self.normed, self.io_type = model.output_stages, model.normed, io_type

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, found = self.patch_embed(images.float()), []
        for stage, layer in enumerate(self.layers):
            for block in layer.blocks:
                x = block(x)
            if stage in self.stages:
                found.append(self.normed(x, stage).permute(0, 3, 1, 2).to(self.io_type))
            if layer.downsample is not None:
                x = layer.downsample(x)
        return tuple(found)
