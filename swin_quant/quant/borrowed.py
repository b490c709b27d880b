"""Layers whose weight or bias belongs to another module, or is computed from parameters, as by weight standardisation.

What belongs to another module stays its parameter, under its key. What is computed is a parameter of the layer, under a
key of its own; a checkpoint without that key gives the parameters that it is computed from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.quant.conv import QuantConv2d
from swin_quant.quant.layer import QuantizedLayer
from swin_quant.quant.linear import QuantLinear


@dataclass(frozen=True)
class Lender:
    """Where a weight or bias comes from: the keys of parameters, and the function that computes it from their values;
    None: it is that parameter itself."""

    keys: tuple[str, ...]
    function: Callable[..., Tensor] | None = None


class Borrowed(QuantizedLayer):
    """The mixin: `sources` of "weight" and "bias", for those that the layer does not own."""

    sources: dict[str, Lender]

    @property
    def lenders(self) -> list[str]:
        """The keys of the parameters that it borrows, or computes from."""
        return [key for source in self.sources.values() for key in source.keys]

    def borrow(self, sources: Mapping[str, Lender], values: Mapping[str, Any]) -> None:
        """Take the parameters, and those that are computed from them; `values`: parameters by key."""
        self.sources = dict(sources)
        for own, source in sources.items():
            given = [values[key] for key in source.keys]
            if source.function is None:
                setattr(self, own, given[0])
            else:
                with torch.no_grad():
                    setattr(self, own, nn.Parameter(source.function(*given).detach().clone()))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for own, source in self.sources.items():
            if source.function is None:
                destination.pop(f"{prefix}{own}", None)

    def _load_from_state_dict(
        self, state: Any, prefix: str, local: Any, strict: bool, missing: Any, *lists: Any
    ) -> None:
        without: list[str] = []
        super()._load_from_state_dict(state, prefix, local, strict, without, *lists)
        tied = {f"{prefix}{own}" for own, source in self.sources.items() if source.function is None}
        missing += [key for key in without if key not in tied]


class BorrowedLinear(Borrowed, QuantLinear):
    """y = Q_aftergemm(Q_input(x) Q_weight(W)^T) + bias, as `QuantLinear`."""


class BorrowedConv2d(Borrowed, QuantConv2d):
    """A convolution as `QuantConv2d`."""


@torch.no_grad()
def computed(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the weights that the layers of `model` compute from it, where it does not hold them."""
    found = dict(state)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Borrowed)}
    kept = {*model.state_dict()} if layers else set()
    fixed = {key: value for key, value in model.named_buffers() if key not in kept}  # in no checkpoint
    for name, layer in layers.items():
        for own, source in layer.sources.items():
            values = [state.get(key, fixed.get(key)) for key in source.keys]
            if source.function and f"{name}.{own}" not in state and all(isinstance(one, Tensor) for one in values):
                found[f"{name}.{own}"] = source.function(*(one.float() for one in values if one is not None))
    return found
