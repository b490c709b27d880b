"""Registers plugins' operators in torch, so that a traced graph can hold them and run without the user's library.

If the user's library was loaded before and defines them, its operators are used.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.operators.plugins import Node, Plugin


def _roll(x: Tensor, shifts: list[int], dims: list[int]) -> Tensor:
    return torch.roll(x, shifts, dims)


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor, axis: int, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _window_partition(x: Tensor, window: int) -> Tensor:
    cut = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # [B, H / w, w, W / w, w, C]
    return cut.transpose(2, 3).reshape(-1, window * window, x.shape[-1])


# Operator -> its inputs and attributes, written as in torch's schemas, and the function that computes it.
SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "roll": ("Tensor x, int[] shifts, int[] dims", _roll),
    "relu": ("Tensor x", torch.relu),
    "layer_norm": ("Tensor x, Tensor scale, Tensor bias, int axis, float epsilon", _layer_norm),
    "window_partition": ("Tensor x, int window", _window_partition),
}
_ours: list[Any] = []  # torch libraries, kept alive: an operator lives as long as the library that defined it


def check(plugins: Mapping[str, Plugin]) -> None:
    """UsageError for an operator that a trace cannot hold, and for a domain that torch cannot call."""
    for operator, plugin in plugins.items():
        if operator not in SCHEMAS:
            raise UsageError(f"‹plugin› {operator}: only ONNX files have it; traced ones have {', '.join(SCHEMAS)}")
        if "." in plugin.domain:
            raise UsageError(
                f"‹plugin› {operator}={plugin.domain}::{plugin.name}: domains here have no dots: choose another"
            )


def define(plugins: Mapping[str, Plugin]) -> None:
    """Register each plugin's operator in torch unless it is there. UsageError as `check` raises it."""
    check(plugins)
    for operator, plugin in plugins.items():
        arguments, function = SCHEMAS[operator]
        if not hasattr(getattr(torch.ops, plugin.domain), plugin.name):
            library = torch.library.Library(plugin.domain, "FRAGMENT")
            library.define(f"{plugin.name}({arguments}) -> Tensor")
            library.impl(plugin.name, function, "CompositeImplicitAutograd")
            _ours.append(library)


def call(plugin: Plugin, node: Node) -> Tensor:
    """Call a plugin's operator, which a trace holds as one node."""
    function = getattr(getattr(torch.ops, plugin.domain), plugin.name)
    return function(*node.inputs, *node.attributes.values())
