"""How much the answer of a network feels an error in each channel of what a unit gives.

A small error e moves the softmax from float's by a Kullback-Leibler divergence of e^T F e / 2. F is the Fisher matrix,
and the mean of g g^T: g is the gradient of the logits times A r, where A A^T = diag(p) - p p^T is the divergence's
Hessian in the logits, and r are random signs. One backward pass a batch gives the diagonal of F for all units.
(Martens, "New insights and perspectives on the natural gradient method", 2020; Li et al., "BRECQ", 2021; Wu et al.,
"FIMA-Q", 2025.)
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from swin_quant.quant.layer import channels_last
from swin_quant.quant.outputs import rows
from swin_quant.quant.watch import watching


def root_times_signs(logits: Tensor, signs: Tensor) -> Tensor:
    """A r for each row of logits [B, classes] and signs [B, classes]."""
    p = logits.softmax(1)
    root = p.sqrt() * signs
    return root - p * root.sum(1, keepdim=True)


def channel_weights(model: nn.Module, units: Sequence[str], images: Sequence[Tensor], seed: int) -> dict[str, Tensor]:
    """Name of a unit -> the diagonal of F over the channels of its output [..., channels]: float32, of mean 1.

    Where a model gives maps or embeddings, which have no softmax, F is that of their squared error: A is the identity.
    """
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        part = channels_last(parts[name], gradient.detach()).flatten(0, -2).double().square().sum(0)
        sums[name] = sums[name] + part if name in sums else part

    def look(name: str, module: nn.Module, given: object, y: Tensor) -> None:
        y.register_hook(partial(add, name))

    classes = getattr(model, "classes", 1)
    parts = {name: model.get_submodule(name) for name in units}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad(), watching(parts, look):
        for batch in images:
            x = batch.clone().requires_grad_()
            logits = rows(model(x))
            signs = torch.randint(0, 2, logits.shape, generator=generator).to(logits) * 2 - 1
            felt = root_times_signs(logits.detach(), signs) if classes else signs
            torch.autograd.grad((logits * felt).sum(), x)
    return {name: _relative(total).float() for name, total in sums.items()}


def _relative(total: Tensor) -> Tensor:
    mean = total.mean().item()
    return total / mean if 0 < mean < float("inf") else torch.ones_like(total)
