"""One training step, taken apart, for comparing frameworks: weights, forward, loss, gradients, update."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.score.alignment import IMAGES, LABELS, LOGITS, LOSS, Trace, tracing

_RANDOM = ("Dropout", "DropPath")
_RUNNING = ("running_mean", "running_var")


def step_trace(model: nn.Module, images: Tensor, labels: Tensor, lr: float) -> Trace:
    """All tensors of a step of plain SGD (weights - lr * gradient) on the mean cross-entropy; `model` has taken it.

    Nothing is drawn at random: dropout and stochastic depth are off, all else is in training mode. images:
    [B, 3, H, W], labels: int64 [B].
    """
    model.train()
    for module in model.modules():
        if type(module).__name__.startswith(_RANDOM):
            module.eval()
    trace: Trace = {IMAGES: images, LABELS: labels}
    trace |= {f"weights/{name}": value.detach().clone() for name, value in _state(model)}
    with tracing(model) as found:
        logits = model(images)
    loss = F.cross_entropy(logits, labels)
    trace |= {**found, LOGITS: logits.detach(), LOSS: loss.detach()}
    model.zero_grad(set_to_none=True)
    loss.backward()
    trained = [(name, value) for name, value in model.named_parameters() if value.grad is not None]
    trace |= {f"gradients/{name}": value.grad.clone() for name, value in trained if value.grad is not None}
    torch.optim.SGD([value for _, value in trained], lr=lr).step()
    trace |= {f"update/{name}": value.detach().clone() for name, value in _state(model)}
    model.eval()
    return trace


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, and the running statistics of batch norms, which other frameworks call parameters, too."""
    running = [(name, value) for name, value in model.named_buffers() if name.endswith(_RUNNING)]
    return [*model.named_parameters(), *running]
