"""Nodes as torch's own fake-quantize operators, which compilers fed by tracing read."""

import torch
from torch import Tensor, nn

from swin_quant.quant.quantizer import Quantizer, State, named_nodes


class Off(nn.Identity):
    """A node that is off."""

    state = State.OFF


class FakeQuantize(nn.Module):
    """A node: `aten::fake_quantize_per_tensor_affine`, or `per_channel` along dimension 0 of a weight [out, ...]."""

    state = State.QUANTIZE

    def __init__(self, node: Quantizer, weight: Tensor | None) -> None:
        super().__init__()
        qmin, qmax = node.grid
        span = node.range_for() if weight is None else node.range_for(weight)
        self.scale: Tensor
        self.register_buffer("scale", (span.detach() / qmax).flatten() if span.dim() else span.detach() / qmax)
        self.zero_point = 0 if node.setting.symmetric else -qmin
        self.least, self.most = (qmin, qmax) if node.setting.symmetric else (0, qmax - qmin)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale.dim():
            zeros = torch.zeros_like(self.scale, dtype=torch.int32)
            return torch.fake_quantize_per_channel_affine(x, self.scale, zeros, 0, self.least, self.most)
        return torch.fake_quantize_per_tensor_affine(x, float(self.scale), self.zero_point, self.least, self.most)


def spell_out(model: nn.Module) -> None:
    """Put torch's operators in the place of the model's nodes, in place."""
    for name, node in named_nodes(model).items():
        owner, _, own = name.rpartition(".")
        layer = model.get_submodule(owner)
        weight = layer.weight if own == "_weight_quantizer" and isinstance(layer.weight, Tensor) else None
        layer.add_module(own, FakeQuantize(node, weight) if node.setting.enabled else Off())
