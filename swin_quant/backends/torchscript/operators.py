"""Operators of a user's own in torch's registry: what a plugin's node is in a traced graph, and runs without it.

A library of the user's that defines them, loaded before, is taken instead.
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


# Operator -> its inputs and attributes as torch's schemas write them, and what it computes.
SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "roll": ("Tensor x, int[] shifts, int[] dims", _roll),
    "relu": ("Tensor x", torch.relu),
    "layer_norm": ("Tensor x, Tensor scale, Tensor bias, int axis, float epsilon", _layer_norm),
    "window_partition": ("Tensor x, int window", _window_partition),
}
_ours: list[Any] = []  # libraries of torch: an operator lives as long as the one that defined it


def check(plugins: Mapping[str, Plugin]) -> None:
    """UsageError for an operator that a trace does not have, and a domain that torch cannot call."""
    for operator, plugin in plugins.items():
        if operator not in SCHEMAS:
            raise UsageError(f"‹plugin› {operator}: only ONNX files have it; traced ones have {', '.join(SCHEMAS)}")
        if "." in plugin.domain:
            raise UsageError(
                f"‹plugin› {operator}={plugin.domain}::{plugin.name}: domains here have no dots: choose another"
            )


def define(plugins: Mapping[str, Plugin]) -> None:
    """Give torch each plugin's operator, where nobody has. UsageError for one that `check` refuses."""
    check(plugins)
    for operator, plugin in plugins.items():
        arguments, function = SCHEMAS[operator]
        if not hasattr(getattr(torch.ops, plugin.domain), plugin.name):
            library = torch.library.Library(plugin.domain, "FRAGMENT")
            library.define(f"{plugin.name}({arguments}) -> Tensor")
            library.impl(plugin.name, function, "CompositeImplicitAutograd")
            _ours.append(library)


def call(plugin: Plugin, node: Node) -> Tensor:
    """The operator, called: a trace has it as one node."""
    function = getattr(getattr(torch.ops, plugin.domain), plugin.name)
    return function(*node.inputs, *node.attributes.values())
