"""Layers that multiply their input by a weight, with nodes on input, weight and product (docs/reference, section 1.4).

A layer may borrow its weight or bias. A borrowed parameter stays in the other module, under its key. A computed one, as
in weight standardisation, becomes a parameter of the layer under its own key; if a checkpoint lacks that key, it is
computed from the checkpoint's parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.quant.quantizer import Quantizer, Role, State

WEIGHT_NODE = "_weight_quantizer"
NODES = ("_input_quantizer", WEIGHT_NODE, "_aftergemm_quantizer")


@dataclass(frozen=True)
class Lender:
    """The source of a weight or bias: parameter keys, and a function of their values; None: the parameter itself."""

    keys: tuple[str, ...]
    function: Callable[..., Tensor] | None = None


class QuantizedLayer(nn.Module):
    """y = Q_aftergemm(product(Q_input(x), Q_weight(W))) + bias.

    A mixin for torch's own class, which defines the product, as in `class QuantLinear(QuantizedLayer, nn.Linear)`.
    `weight` is [out, ...], `bias` [out] or None. `shared_parameters`: those of both that are read elsewhere too, and
    that passes leave as they are. `sources`: the lenders of "weight" and "bias", if the layer does not own them.
    """

    channel_dim = -1  # of inputs and outputs
    output_has_bias = False  # whether _aftergemm quantizes the product with its bias
    stored_dim = 0  # the dimension of outputs in the weight that files hold
    shared_parameters: frozenset[str] = frozenset()
    sources: Mapping[str, Lender] = {}
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

    def stored_product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`product`, of a weight whose outputs are in dimension `stored_dim`."""
        return self.product(x, weight, bias)

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
    def shift_bias(self, shift: Tensor) -> None:
        """Add `shift` [out] to the bias in place, at the outputs that are `shiftable`."""
        if self.shiftable().any():
            self.bias.add_(shift)

    def shiftable(self) -> Tensor:
        """Whether `shift_bias` reaches each output, bool [out]: those with a bias of their own."""
        has_own = self.bias is not None and "bias" not in self.shared_parameters
        return torch.full((len(self.weight),), has_own, device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        bias, x, weight = self.effective_bias(), self._input_quantizer(x), self._weight_quantizer(self.weight)
        if self.output_has_bias or bias is None or self._aftergemm_quantizer.state is State.OFF:
            return self._aftergemm_quantizer(self.product(x, weight, bias))
        product = self._aftergemm_quantizer(self.product(x, weight))
        return product + self.aligned(bias).to(product.dtype)

    @property
    def lenders(self) -> list[str]:
        """The keys of the parameters that the layer borrows or computes from."""
        return [key for source in self.sources.values() for key in source.keys]

    def borrow(self, sources: Mapping[str, Lender], values: Mapping[str, Any]) -> None:
        """Take borrowed parameters and compute the others; `values`: parameters by key."""
        self.sources = dict(sources)
        for own, source in sources.items():
            lent = [values[key] for key in source.keys]
            if source.function is None:
                setattr(self, own, lent[0])
            else:
                with torch.no_grad():
                    setattr(self, own, nn.Parameter(source.function(*lent).detach().clone()))

    def _tied(self, prefix: str) -> list[str]:
        return [f"{prefix}{own}" for own, source in self.sources.items() if source.function is None]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in self._tied(prefix):
            destination.pop(key, None)

    def _load_from_state_dict(
        self, state: Any, prefix: str, local: Any, strict: bool, missing: Any, *lists: Any
    ) -> None:
        without: list[str] = []
        super()._load_from_state_dict(state, prefix, local, strict, without, *lists)
        missing += [key for key in without if key not in self._tied(prefix)]


def channels_last(module: nn.Module, y: Tensor) -> Tensor:
    """`y`, an input or output of `module`, with channels in the last dimension."""
    return y.movedim(getattr(module, "channel_dim", -1), -1)


def weighted_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Layers by the name of their weight node, in module order."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    return {f"{name}.{WEIGHT_NODE}" if name else WEIGHT_NODE: layer for name, layer in layers.items()}


class QuantLinear(QuantizedLayer, nn.Linear):
    """y = Q_aftergemm(Q_input(x) Q_weight(W)^T) + bias. x: [..., in], y: [..., out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.add_nodes()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)


class QuantConv(QuantizedLayer):
    """y = Q_aftergemm(Q_input(x) * Q_weight(W) + bias). x: [B, in, ...], y: [B, out, ...].

    A mixin for torch's classes. Ranges per channel are those of outputs, [out, 1, ...], if depthwise of filters.
    """

    channel_dim = 1
    output_has_bias = True
    _conv_forward: Any  # each of torch's classes has it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_nodes()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._conv_forward(x, weight, bias)


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


class QuantConvTranspose2d(QuantConv, nn.ConvTranspose2d):  # type: ignore[misc]  # fewer inputs than torch's
    """A transposed convolution of one group: its weight [out, in, ...] is computed from torch's, [in, out, ...]."""

    stored_dim = 1

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.stored_product(x, weight.transpose(0, 1), bias)

    def stored_product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        how = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return F.conv_transpose2d(x, weight, bias, *how)  # type: ignore[arg-type]  # tuples of two numbers


@torch.no_grad()
def computed(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the missing weights that layers of `model` compute from it."""
    found = dict(state)
    named = model.named_modules(remove_duplicate=False)  # files hold a shared module by each of its names
    layers = {name: layer for name, layer in named if isinstance(layer, QuantizedLayer) and layer.sources}
    kept = {*model.state_dict()} if layers else set()
    fixed = {key: value for key, value in model.named_buffers() if key not in kept}  # buffers that no checkpoint holds
    for name, layer in layers.items():
        for own, source in layer.sources.items():
            values = [state.get(key, fixed.get(key)) for key in source.keys]
            if source.function and f"{name}.{own}" not in state and all(isinstance(one, Tensor) for one in values):
                found[f"{name}.{own}"] = source.function(*(one.float() for one in values if one is not None))
    return found


class ChannelFactors(nn.Module):
    """Multiply channel c of x [..., C] by weight[c]; without a weight, return x.

    A float checkpoint has no weight here; `quant.passes.equalize` makes one, and later checkpoints load it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight: nn.Parameter | None
        self.register_parameter("weight", None)

    def give(self, weight: Tensor | None) -> None:
        """Set the weight to a copy of `weight` [C], or to None."""
        if weight is not None and self.weight is not None:
            self.weight.data.copy_(weight.detach())  # an optimizer may hold the parameter
        else:
            self.weight = None if weight is None else nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x if self.weight is None else x * self.weight.to(x.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        found = state_dict.get(f"{prefix}weight")
        if found is None:
            self.give(None)
        elif self.weight is None:
            self.give(torch.empty_like(found))
        super()._load_from_state_dict(state_dict, prefix, *others)


def made_factors(model: nn.Module) -> list[str]:
    """Names of the `ChannelFactors` with a weight."""
    return [name.removesuffix(".weight") for name, factors in all_factors(model) if factors.weight is not None]


def all_factors(model: nn.Module) -> Iterator[tuple[str, ChannelFactors]]:
    """Each `ChannelFactors` of a model, with the name of its weight, even if it has none."""
    for name, module in model.named_modules():
        if isinstance(module, ChannelFactors):
            yield f"{name}.weight", module


class Reading(nn.Module):
    """The weight and bias of a layer as other parts of a forward pass read them; exporters replace it by copies."""

    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: it would contain itself

    @property
    def weight(self) -> Tensor:
        return self.__dict__["layer"].weight

    @property
    def bias(self) -> Tensor | None:
        return self.__dict__["layer"].bias

    def copies(self) -> nn.Module:
        """The present values as buffers."""
        made = nn.Module()
        for own in ("weight", "bias"):
            value = getattr(self, own)
            made.register_buffer(own, None if value is None else value.detach().clone(), persistent=False)
        return made
