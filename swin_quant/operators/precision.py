"""Find numbers at risk in half precision or INT8, by the weights, by calibrated ranges, or by a few pictures."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.errors import listed
from swin_quant.quant.advice import Advice
from swin_quant.quant.calibration import LARGEST_HALF
from swin_quant.quant.outlier_channels import UNREACHED
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.ranges import range_of
from swin_quant.quant.watch import watching

SQUARE_OVERFLOWS = 256.0  # the square of a larger value overflows float16
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def by_weights(model: nn.Module) -> Iterator[Advice]:
    """Risks in the weights."""
    over, dead, wide = [], {}, {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, _PRODUCTS) and isinstance(weight, Tensor) and not weight.is_meta:
            size = weight.detach().flatten(1).abs().amax(1).float()
            if gone := int((size == 0).sum()):
                dead[name] = gone
            middle = size.median()
            if len(size) > 1 and middle > 0 and (times := float(size.max() / middle)) > UNREACHED:
                wide[name] = times
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.numel() and float(parameter.detach().abs().max()) > LARGEST_HALF:
            over.append(name)
    if over:
        yield Advice("weights-beyond-half", f"{len(over)} parameters exceed the largest float16: {listed(over, 2)}",
                     tuple(over), True)  # fmt: skip
    if dead:
        text = f"dead output channels (weights of 0) in {len(dead)} layers: {_worst(dead)}"
        yield Advice("dead-channels", text, tuple(dead))
    if wide:
        text = (
            f"output channels of {len(wide)} weights stand out, {_worst(wide)} times the median: take a range for each "
            "channel, not one for the tensor"
        )
        yield Advice("outlier-weights", text, tuple(wide))


def by_ranges(model: nn.Module) -> Iterator[Advice]:
    """Risks in a calibrated checkpoint's ranges; none without ranges."""
    nodes: Mapping[str, Quantizer] = {
        name: node
        for name, node in named_nodes(model).items()
        if node.amax is not None and node.role is not Role.GEMM_WEIGHT
    }
    largest = {name: abs(range_of(node).amax) for name, node in nodes.items()}
    if beyond := {name: value for name, value in largest.items() if value > LARGEST_HALF}:
        yield Advice("beyond-half", f"ranges of {len(beyond)} nodes exceed the largest float16: {_worst(beyond)}",
                     tuple(beyond), True)  # fmt: skip
    if dead := [name for name, value in largest.items() if value == 0]:
        yield Advice("dead", f"{len(dead)} nodes saw only zeros in calibration: {listed(dead, 2)}", tuple(dead), True)
    norms = {name: value for name, value in largest.items() if nodes[name].role is Role.NORM_INPUT}
    if risky := {name: value for name, value in norms.items() if value > SQUARE_OVERFLOWS}:
        yield _variance(risky)


def by_pictures(model: nn.Module, images: Tensor) -> Iterator[Advice]:
    """Risks in a forward pass of `images`, [B, in, H, W]."""
    largest: dict[str, float] = {}
    inputs: dict[str, float] = {}
    flat: dict[str, float] = {}
    dead: dict[str, int] = {}
    wide: dict[str, float] = {}
    modules: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, (*_PRODUCTS, *_NORMS))
    }

    def look(name: str, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        largest[name] = float(y.abs().max())
        channels = y.movedim(1, -1) if y.dim() == 4 and isinstance(module, (*_PRODUCTS[1:], *_NORMS[1:])) else y
        size = channels.flatten(0, -2).abs().amax(0).float()
        if gone := int((size == 0).sum()):
            dead[name] = gone
        middle = size.median()
        if len(size) > 1 and middle > 0 and (times := float(size.max() / middle)) > UNREACHED:
            wide[name] = times
        if isinstance(module, nn.LayerNorm):
            inputs[name] = float(args[0].abs().max())
            least = float(args[0].float().var(-1, unbiased=False).min())
            if least < 10 * module.eps:
                flat[name] = least

    with watching(modules, look), torch.no_grad():
        model(images)
    if beyond := {name: value for name, value in largest.items() if value > LARGEST_HALF}:
        yield Advice("beyond-half", f"{len(beyond)} layers exceed the largest float16: {_worst(beyond)}",
                     tuple(beyond), True)  # fmt: skip
    if risky := {name: value for name, value in inputs.items() if value > SQUARE_OVERFLOWS}:
        yield _variance(risky)
    if flat:
        name = min(flat, key=flat.__getitem__)
        text = f"{len(flat)} LayerNorms see variances like their eps, {name} {flat[name]:.2g}: noise grows there"
        yield Advice("flat-norm", text, tuple(flat))
    if dead:
        yield Advice("dead-channels", f"channels of {len(dead)} layers are 0 on every picture: {_worst(dead)}",
                     tuple(dead))  # fmt: skip
    if wide:
        text = f"channels of {len(wide)} outputs stand out, {_worst(wide)} times the median: the pass equalize may help"
        yield Advice("outliers", text, tuple(wide))


def _variance(risky: Mapping[str, float]) -> Advice:
    text = (
        f"squares of {len(risky)} LayerNorms' inputs overflow float16, {_worst(risky)}: keep their variance in float32"
    )
    return Advice("norm-variance", text, tuple(risky), True)


def _worst(found: Mapping[str, float]) -> str:
    name = max(found, key=found.__getitem__)
    return f"{name} most, {found[name]:.4g}"
