"""A network in evaluation mode for a while, and then as it was, part by part."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """No dropout, no drop path, and norms by what they have seen, inside; afterwards every module's mode is its own."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
