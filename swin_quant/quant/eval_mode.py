"""Put a network into evaluation mode for a while, then give every module its own mode back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Inside the context: no dropout, no drop path, norms with running statistics. Afterwards modules have their own
    modes."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
