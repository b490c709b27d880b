"""Multiplications channel by channel, which exist only where a pass needed them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


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


def give_factors(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set each `ChannelFactors` to the weight with its name in `weights`, or to None."""
    for name, factors in all_factors(model):
        factors.give(weights.get(name))


def made_factors(model: nn.Module) -> list[str]:
    """Names of the `ChannelFactors` with a weight."""
    return [name.removesuffix(".weight") for name, factors in all_factors(model) if factors.weight is not None]


def all_factors(model: nn.Module) -> Iterator[tuple[str, ChannelFactors]]:
    """Each `ChannelFactors` of a model, with the name of its weight, even if it has none."""
    for name, module in model.named_modules():
        if isinstance(module, ChannelFactors):
            yield f"{name}.weight", module
