"""A linear layer with nodes on its input, its weight and its product before the bias (docs/reference, section 1.4)."""

import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.quant.layer import QuantizedLayer


class QuantLinear(QuantizedLayer, nn.Linear):
    """y = Q_aftergemm(Q_input(x) Q_weight(W)^T) + bias. x: [..., in], y: [..., out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.add_nodes()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)
