"""Layers whose weight or bias belongs to another module, or is computed from parameters, as in weight standardisation.

A borrowed parameter stays in the other module, under its key. A computed one becomes a parameter of the layer under its
own key; if a checkpoint lacks that key, it is computed from the checkpoint's parameters.
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
    """The source of a weight or bias: parameter keys, and a function of their values; None: the parameter itself."""

    keys: tuple[str, ...]
    function: Callable[..., Tensor] | None = None


class Borrowed(QuantizedLayer):
    """The mixin. `sources`: the lenders of "weight" and "bias", if the layer does not own them."""

    sources: dict[str, Lender]

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
    """`state` with the missing weights that layers of `model` compute from it."""
    found = dict(state)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Borrowed)}
    kept = {*model.state_dict()} if layers else set()
    fixed = {key: value for key, value in model.named_buffers() if key not in kept}  # buffers that no checkpoint holds
    for name, layer in layers.items():
        for own, source in layer.sources.items():
            values = [state.get(key, fixed.get(key)) for key in source.keys]
            if source.function and f"{name}.{own}" not in state and all(isinstance(one, Tensor) for one in values):
                found[f"{name}.{own}"] = source.function(*(one.float() for one in values if one is not None))
    return found
