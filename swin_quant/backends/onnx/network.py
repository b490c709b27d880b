"""From a trained model to the one that is exported: nodes lowered, rewrites applied, float types set."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from swin_quant.backends.onnx.half import halve, match_scales
from swin_quant.backends.onnx.layers import lower
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.backends.onnx.rewrites import apply_rewrites
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin


class Network(nn.Module):
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


def network(model: Swin, options: OnnxOptions, beyond_half: Iterable[str] = ()) -> Network:
    """A copy of `model`, whose policy is applied and whose nodes have ranges, as it is exported, on the CPU.

    `beyond_half` names the nodes whose values overflow float16.
    """
    model = copy.deepcopy(model).cpu().eval()
    lower(model)
    apply_rewrites(model, options.applied)
    if options.floats == "float16":
        halve(model, beyond_half)
    exported = Network(model, getattr(torch, options.io_type)).eval().requires_grad_(False)
    match_scales(exported, example(model.geometry, options, 1))
    return exported


def example(geometry: Geometry, options: OnnxOptions, batch: int) -> Tensor:
    """Black pictures [batch, in, S, S]."""
    shape = batch, geometry.in_chans, geometry.image_size, geometry.image_size
    return torch.zeros(shape, dtype=getattr(torch, options.io_type))
