"""Save and restore the weights and ranges of a network or a part of one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swin_quant.quant.factors import give_factors
from swin_quant.quant.fold import unfolding
from swin_quant.quant.policy import apply_settings
from swin_quant.quant.quantizer import Quantizer, named_nodes

Values = dict[str, Tensor]
AMAX, BOUNDS = "._amax", "._bounds"  # endings of ranges' names


def state_of(module: nn.Module) -> Values:
    """Weights and ranges by name, copied."""
    values: dict[str, Tensor | None] = dict(module.named_parameters())
    for name, node in _nodes(module).items():
        values |= {name + AMAX: node.amax, name + BOUNDS: node.bounds}
    return {name: value.detach().clone() for name, value in values.items() if value is not None}


def weights_in(state: Values) -> Values:
    """The weights in a state."""
    return {name: value for name, value in state.items() if not name.endswith((AMAX, BOUNDS))}


@torch.no_grad()
def give_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore a state of `module` from `state_of`."""
    nodes = _nodes(module)
    give_factors(module, state)
    for name, parameter in module.named_parameters():
        parameter.copy_(state[name])
    for name, node in nodes.items():
        node.amax, node.bounds = state.get(name + AMAX), state.get(name + BOUNDS)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """After an error or interrupt inside the context, norms, weights, ranges and settings are as before."""
    unfold = unfolding(model)
    before, settings = state_of(model), {name: node.setting for name, node in named_nodes(model).items()}
    try:
        yield
    except BaseException:
        unfold()
        give_state(model, before)
        apply_settings(model, settings)
        raise


def _nodes(module: nn.Module) -> dict[str, Quantizer]:
    return {name: each for name, each in module.named_modules() if isinstance(each, Quantizer)}
