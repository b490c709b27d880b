"""A network of your own as a model: traced, with nodes where products and additions are."""

import copy

import torch
from torch import nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.preprocess import Preprocess
from swin_quant.model import Model
from swin_quant.models.traced import traced

_CLOSE = 1e-4  # share of the largest logit: folded constants may round otherwise


def wrap(
    module: nn.Module,
    size: int,
    *,
    name: str = "model",
    channels: int = 3,
    preprocess: Preprocess | None = None,
    stem: bool = True,
) -> Model:
    """A classifier of your own, any nn.Module that torch.fx can trace, ready to calibrate; `module` stays as it is.

    `size`: of its pictures [B, channels, size, size], in pixels. Linears, convolutions (batch norms are folded into
    them), products of attention and additions get nodes (docs/any_model.md); `stem` False leaves the layer that reads
    the pictures float. SwinQuantError where it cannot be traced, with the module and the reason, gives no logits
    [B, classes], or computes something else when traced, since what it does depends on its input.
    """
    if size < 1 or channels < 1:
        raise UsageError(f"size {size}, channels {channels}: must be at least 1")
    original = copy.deepcopy(module).eval()
    device = next((parameter.device for parameter in original.parameters()), torch.device("cpu"))
    images = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        try:
            wanted = original(images)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise SwinQuantError(f"{name}: does not take pictures {list(images.shape)}: {reason}") from error
        if not isinstance(wanted, torch.Tensor) or wanted.dim() != 2 or len(wanted) != len(images):
            given = list(wanted.shape) if isinstance(wanted, torch.Tensor) else type(wanted).__name__
            raise SwinQuantError(f"{name}: gives {given} for 2 pictures, not logits [2, classes]")
        network = traced(original, size, channels, wanted.shape[1], what=name, stem=stem)
        found = network.eval()(images)
    if (found - wanted).abs().max() > _CLOSE * wanted.abs().max():
        raise SwinQuantError(f"{name}: computes something else when traced: what it does depends on its input")
    return Model(network, name, preprocess)
