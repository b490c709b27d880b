"""A convolution with nodes on its input, its weight and its product (as linears in docs/reference, section 1.4)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.quant.layer import QuantizedLayer


class QuantConv2d(QuantizedLayer, nn.Conv2d):
    """y = Q_aftergemm(Q_input(x) * Q_weight(W) + bias). x: [B, in, H, W], y: [B, out, H', W'].

    A range per channel is one for each output channel, [out, 1, 1, 1]; in depthwise convolutions for each filter.
    """

    channel_dim = 1
    output_has_bias = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_nodes()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def columns(self, x: Tensor) -> Tensor | None:
        """Patches of the padded input; None for groups, and for paddings other than zeros."""
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        patches = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])

    def aligned(self, bias: Tensor) -> Tensor:
        return bias[:, None, None]
