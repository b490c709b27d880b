"""The network whose parts were rewritten."""

import torch
from torch import Tensor, nn

from swin_quant.models.layers import Swin


class SwinNetwork(nn.Module):
    """Pictures [B, in, S, S] -> logits [B, classes], both of `io_type`; submodules keep the trained model's names."""

    def __init__(self, model: Swin, io_type: torch.dtype) -> None:
        super().__init__()
        self.patch_embed, self.layers, self.norm, self.head = model.patch_embed, model.layers, model.norm, model.head
        self.position: Tensor | None
        position = model.absolute_pos_embed
        self.register_buffer("position", None if position is None else position.detach())
        self.io_type = io_type

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        if self.position is not None:
            x = x + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1)).to(self.io_type)
