"""Fold batch normalisation into the layer before it, so that the quantized product is the engine's.

y = (W x + b - mean) f + beta with f = gamma / sqrt(var + eps) is a layer with weight W f and bias (b - mean) f + beta.
A model's `foldable` maps the name of a norm to that of the layer before it, whose output only this norm reads. A model
is trained with its norms and calibrated without; a state_dict of either kind fits (`fitted`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from swin_quant.quant.layer import QuantizedLayer, computed
from swin_quant.quant.outputs import rows

COUNTERS = ".num_batches_tracked"
_KEYS = ("weight", "bias", "running_mean", "running_var")


class Folded(nn.Module):
    """The remains of a folded norm: its child modules, such as the activation in some norms."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps  # for weights loaded later
        for name, child in norm.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def list_foldable_norms(model: nn.Module) -> Mapping[str, str]:
    """Maps the name of a norm to the layer that it can be folded into; empty by default."""
    return getattr(model, "foldable", {})


def is_folded(model: nn.Module) -> bool:
    """Whether a model has foldable norms, and they are folded."""
    return any(isinstance(model.get_submodule(norm), Folded) for norm in list_foldable_norms(model))


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Fold every foldable norm of the model in place; a second call changes nothing."""
    if is_folded(model):
        return
    for name, layer_name in list_foldable_norms(model).items():
        norm, layer = cast(nn.BatchNorm2d, model.get_submodule(name)), model.get_submodule(layer_name)
        parts = {key: getattr(norm, key) for key in _KEYS}
        weight, bias = _product(cast(Tensor, layer.weight), cast("Tensor | None", layer.bias), parts, norm.eps)
        layer.weight = nn.Parameter(weight)
        layer.bias = nn.Parameter(bias)
        model.set_submodule(name, Folded(norm))
    for layer in (one for one in model.modules() if isinstance(one, QuantizedLayer)):
        for own, source in layer.sources.items():
            owner, _, key = source.keys[0].rpartition(".")
            lent = getattr(model.get_submodule(owner), key, None)  # a folded norm has none
            if source.function is None and getattr(layer, own) is not lent:
                # What it shared with a folded layer is now its own, and lies in files.
                layer.sources = {**layer.sources, own: replace(source, function=torch.clone)}


@torch.no_grad()
def is_fold_exact(model: nn.Module, images: Tensor) -> bool:
    """Whether `model`, in evaluation mode, gives the same with its norms folded, to a thousandth of the largest."""
    wanted, undo = rows(model(images)), unfolding(model)
    try:
        fold(model)
        found = rows(model(images))
    finally:
        undo()
    return bool((found - wanted).abs().max() <= 1e-3 * wanted.abs().max())


def unfolding(model: nn.Module) -> Callable[[], None]:
    """A function that undoes a later `fold`: it restores the norms of `model` and the weights before them."""
    parts = [
        (name, model.get_submodule(name), model.get_submodule(layer))
        for name, layer in list_foldable_norms(model).items()
    ]
    weights = [(layer, layer.weight, layer.bias) for *_, layer in parts]
    lent = [(layer, layer.sources) for layer in model.modules() if isinstance(layer, QuantizedLayer)]

    def undo() -> None:
        for name, norm, _ in parts:
            model.set_submodule(name, norm)
        for layer, weight, bias in weights:
            layer.weight, layer.bias = weight, bias
        for borrower, sources in lent:
            borrower.sources = sources

    return undo


def fitted(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, folded if it has norms and `model` has none; folds `model` in the opposite case.

    Weights that layers compute from other parameters are included.
    """
    norms, state = list_foldable_norms(model), computed(model, state)
    state = {key: value for key, value in state.items() if not (norms and key.endswith(COUNTERS))}
    has_norms = any(f"{norm}.running_var" in state for norm in norms)
    if norms and not has_norms:
        fold(model)
    if not has_norms or not is_folded(model):
        return state
    for norm, layer in norms.items():
        parts: dict[str, Any] = {key: state.pop(f"{norm}.{key}", None) for key in _KEYS}
        weight, bias = state.get(f"{layer}.weight"), state.get(f"{layer}.bias")
        if weight is None or not weight.is_floating_point():
            continue
        # Parts of another length are refused later, by their shapes.
        if all(part is None or part.shape == weight.shape[:1] for part in parts.values()):
            eps = cast(Folded, model.get_submodule(norm)).eps
            state[f"{layer}.weight"], state[f"{layer}.bias"] = _product(weight, bias, parts, eps)
    return state


def _product(weight: Tensor, bias: Tensor | None, parts: Mapping[str, Any], eps: float) -> tuple[Tensor, Tensor]:
    """Weight [out, ...] and bias [out] of layer and norm together, computed in float64."""
    zeros = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    mean, variance = parts["running_mean"].double(), parts["running_var"].double()
    factor = (zeros + 1 if parts["weight"] is None else parts["weight"].double()) / (variance + eps).sqrt()
    shift = zeros if parts["bias"] is None else parts["bias"].double()
    moved = ((zeros if bias is None else bias.double()) - mean) * factor + shift
    scaled = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
    return scaled.to(weight.dtype), moved.to(weight.dtype)
