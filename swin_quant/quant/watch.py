"""Run a network in evaluation mode, and watch its modules while it computes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

Visit = Callable[[str, nn.Module, tuple[Any, ...], Any], object]


@contextmanager
def watching(modules: Mapping[str, nn.Module], visit: Visit) -> Iterator[None]:
    """Inside the context, `visit(name, module, inputs, output)` is called after each forward pass of the modules.

    Its result is ignored; its exceptions end the forward pass.
    """
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(_call, visit, name)))
        yield


def _call(visit: Visit, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    visit(name, module, inputs, output)


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Inside the context: no dropout, no drop path, norms with running statistics."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
