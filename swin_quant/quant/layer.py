"""A layer that multiplies its input by a weight, and its nodes (docs/reference, section 1.4)."""

from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.quant.quantizer import Quantizer, Role, State

WEIGHT_NODE = "_weight_quantizer"


class QuantizedLayer(nn.Module):
    """y = Q_aftergemm(product(Q_input(x), Q_weight(W))) + bias.

    A mixin for torch's own class, which defines the product, as in `class QuantLinear(QuantizedLayer, nn.Linear)`.
    `weight` is [out, ...], `bias` [out] or None.
    """

    channel_dim = -1  # of inputs and outputs
    output_has_bias = False  # whether _aftergemm quantizes the product with its bias
    weight: Tensor
    bias: Any  # a parameter or None; each of torch's classes declares it

    def add_nodes(self) -> None:
        """Add the nodes; call it after torch's class is initialised."""
        self._input_quantizer = Quantizer(Role.GEMM_INPUT)
        self._weight_quantizer = Quantizer(Role.GEMM_WEIGHT)
        self._aftergemm_quantizer = Quantizer(Role.GEMM_OUTPUT)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of x and a weight that may be quantized, plus `bias` if there is one."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its product is")

    def columns(self, x: Tensor) -> Tensor | None:
        """The vectors [products, in] of the input `x` that multiply the rows of the flattened weight [out, in].

        None if rows have different vectors, or the kind of layer does not say.
        """
        return x.reshape(-1, x.shape[-1]) if isinstance(self, nn.Linear) else None

    def aligned(self, bias: Tensor) -> Tensor:
        """`bias` [out] in a shape that can be added to the product."""
        return bias

    def effective_bias(self) -> Tensor | None:
        """The sum [out] that is added to the product, or None; layers with a bias of several parts override it."""
        return self.bias

    @torch.no_grad()
    def shift_bias(self, shift: Tensor) -> Tensor:
        """Add `shift` [out] to the bias in place, and return the part that was added: 0 for outputs without a bias."""
        if self.bias is None:
            return torch.zeros_like(shift)
        self.bias.add_(shift)
        return shift

    def shiftable(self) -> Tensor:
        """Whether `shift_bias` reaches each output, bool [out]."""
        return torch.full((len(self.weight),), self.bias is not None, device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.effective_bias()
        x, weight = self._input_quantizer(x), self._weight_quantizer(self.weight)
        if self.output_has_bias or bias is None or self._aftergemm_quantizer.state is State.OFF:
            return self._aftergemm_quantizer(self.product(x, weight, bias))
        product = self._aftergemm_quantizer(self.product(x, weight))
        return product + self.aligned(bias).to(product.dtype)


def channels_last(module: nn.Module, y: Tensor) -> Tensor:
    """`y`, an input or output of `module`, with channels in the last dimension."""
    return y.movedim(getattr(module, "channel_dim", -1), -1)


def weighted_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Layers by the name of their weight node, in module order."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    return {f"{name}.{WEIGHT_NODE}" if name else WEIGHT_NODE: layer for name, layer in layers.items()}
