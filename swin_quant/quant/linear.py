"""A linear layer with nodes on its input, its weight and its product before the bias (docs/reference, section 1.4)."""

import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.quant.quantizer import Quantizer, Role, State


class QuantLinear(nn.Linear):
    """y = Q_aftergemm(Q_input(x) Q_weight(W)^T) + bias. x: [..., in], y: [..., out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._input_quantizer = Quantizer(Role.GEMM_INPUT)
        self._weight_quantizer = Quantizer(Role.GEMM_WEIGHT)
        self._aftergemm_quantizer = Quantizer(Role.GEMM_OUTPUT)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` replaces the layer's own, for layers whose bias is put together by their owner."""
        bias = self.bias if bias is None else bias
        x, weight = self._input_quantizer(x), self._weight_quantizer(self.weight)
        if self._aftergemm_quantizer.state is State.OFF or bias is None:
            return self._aftergemm_quantizer(F.linear(x, weight, bias))
        product = self._aftergemm_quantizer(F.linear(x, weight))
        return product + bias.to(product.dtype)
