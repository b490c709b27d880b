"""Convolutions with nodes on input, weight and product (as linears in docs/reference, section 1.4)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.quant.layer import QuantizedLayer


class QuantConv(QuantizedLayer):
    """y = Q_aftergemm(Q_input(x) * Q_weight(W) + bias). x: [B, in, ...], y: [B, out, ...].

    A mixin for torch's classes. Ranges per channel are one for each output channel, [out, 1, ...]; in depthwise
    convolutions one for each filter.
    """

    channel_dim = 1
    output_has_bias = True
    _conv_forward: Any  # each of torch's classes has it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_nodes()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = self._conv_forward(x, weight, bias)
        return result

    def aligned(self, bias: Tensor) -> Tensor:
        return bias.view(-1, *[1] * (self.weight.dim() - 2))


class QuantConv1d(QuantConv, nn.Conv1d):
    """x: [B, in, L], y: [B, out, L']."""


class QuantConv3d(QuantConv, nn.Conv3d):
    """x: [B, in, D, H, W], y: [B, out, D', H', W']."""


class QuantConv2d(QuantConv, nn.Conv2d):
    """x: [B, in, H, W], y: [B, out, H', W']."""

    def columns(self, x: Tensor) -> Tensor | None:
        """Patches of the padded input; None for groups, and for padding other than zeros."""
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        patches = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])
